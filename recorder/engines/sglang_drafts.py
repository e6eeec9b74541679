"""EAGLE's draft steps that run inside one CUDA graph, told one by one after the graph has run.

Outside a graph each step is a forward of the draft runner's own. Inside, the tokens of a step are known only when the
graph is through: they come out of it. Nothing that one step writes is overwritten by the next, so the bytes read
after the graph are those that each step wrote.
"""

from dataclasses import dataclass
from typing import Any

from ..host_arrays import Int64Array, own_int64


@dataclass(slots=True, kw_only=True)
class DraftStep:
    """One step of a draft, with the fields of SGLang's `ForwardBatch` that the adapter looks at."""

    forward_mode: Any
    rids: Any
    req_pool_indices: Any
    seq_lens: Any
    spec_info: Any
    input_ids: Int64Array
    positions: Int64Array
    out_cache_loc: Int64Array


class DraftGraph:
    """What goes into a graph of several draft steps, taken down before it runs.

    Raises:
        ValueError: a draft tree (top-k above 1), whose steps are no chain.
    """

    def __init__(self, graph_runner: Any, batch: Any) -> None:
        topk = int(getattr(graph_runner, "topk", 1))
        if topk != 1:
            raise ValueError(f"EAGLE with top-k {topk} cannot be recorded, expected 1")
        self._rows = own_int64(batch.req_pool_indices)
        self._positions = own_int64(batch.positions)
        bs = self._rows.size
        self._slots = own_int64(batch.out_cache_loc).reshape((bs, -1) if bs else (0, 1))  # [bs, steps]
        self._seq_lens = own_int64(batch.seq_lens)
        self._mode, self._rids, self._spec_info = batch.forward_mode, tuple(batch.rids or ()), batch.spec_info

    def steps(self, result: Any) -> list[DraftStep]:
        """Return the forwards that ran in the graph, from what came out of it: `draft_tokens` `[bs, steps]`."""
        bs = self._rows.size
        tokens = own_int64(result[2]).reshape((bs, -1) if bs else (0, 1))
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
