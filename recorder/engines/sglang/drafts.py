"""EAGLE's draft steps that run inside one CUDA graph that cannot be looked into, told one by one after it has run.

`sglang_inside` takes each step down in the graph. Where that is not possible, on the host's path and in versions whose
graphs are captured elsewhere, tokens, positions and slots of a step are worked out: the header names them as derived.
Tokens are known only when the graph is through: they come out of it. Nothing that one step writes is overwritten by the next, so the bytes read
after the graph are those that each step wrote.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class DraftStep:
    """One step of a draft, with the fields of SGLang's `ForwardBatch` that the adapter looks at."""

    forward_mode: Any
    rids: Any
    req_pool_indices: Any
    seq_lens: Any
    spec_info: Any
    input_ids: Any
    positions: Any
    out_cache_loc: Any


def check_chain(graph_runner: Any) -> None:
    """Raise a `ValueError` for a draft tree (top-k above 1), whose steps are no chain."""
    topk = int(getattr(graph_runner, "topk", 1))
    if topk != 1:
        raise ValueError(f"EAGLE with top-k {topk} cannot be recorded, expected 1")


class DraftGraph:
    """What goes into a graph of several draft steps, taken down before it runs.

    Args:
        graph_runner: SGLang's runner of the graph.
        batch: the `ForwardBatch`.
        own: makes a copy of a tensor, here or on the device.

    Raises:
        ValueError: a draft tree (top-k above 1), whose steps are no chain.
    """

    def __init__(self, graph_runner: Any, batch: Any, *, own: Callable[[Any], Any]) -> None:
        check_chain(graph_runner)
        self._own = own
        self._rows = own(batch.req_pool_indices)
        self._positions = own(batch.positions)
        bs = int(self._rows.shape[0])
        self._slots = own(batch.out_cache_loc).reshape((bs, -1) if bs else (0, 1))  # [bs, steps]
        self._seq_lens = own(batch.seq_lens)
        self._mode, self._rids, self._spec_info = batch.forward_mode, list(batch.rids or ()), batch.spec_info

    def steps(self, result: Any) -> list[DraftStep]:
        """Return the forwards that ran in the graph, from what came out of it: `draft_tokens` `[bs, steps]`."""
        bs = int(self._rows.shape[0])
        tokens = self._own(result[2]).reshape((bs, -1) if bs else (0, 1))
        return [
            DraftStep(
                forward_mode=self._mode,
                rids=self._rids,
                req_pool_indices=self._rows,
                seq_lens=self._seq_lens,
                spec_info=self._spec_info,
                input_ids=tokens[:, step],
                positions=self._positions + step,
                out_cache_loc=self._slots[:, step],
            )
            for step in range(self._slots.shape[1] - 1)
        ]
