"""SGLang's `ForwardBatch` where its tensors lie on a GPU: nothing of them is read here, only passed on."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np

from ..device.forward import DeviceForward
from ..host_arrays import Int64Array
from .sglang_forward import MODES
from .sglang_layout import RunnerLayout
from .sglang_requests import KnownRequest, RequestBook, TokenLists

_LISTS: Final = attrgetter("req.origin_input_ids", "req.output_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBatch:
    """The requests of a batch: `ids` `[rows]`, -1 for padding; `lists` None where one is not known.

    `lists` are the requests' tokens, `prompt_lens` `[n]` how many of each are its prompt, `outputs` the lists to which
    the scheduler appends what it samples.
    """

    rids: tuple[str, ...]
    rows: int
    version: int
    ids: Int64Array
    requests: Sequence[KnownRequest]
    lists: Sequence[TokenLists] | None
    prompt_lens: Int64Array
    outputs: list[Any]


class KnownBatches:
    """Looks a batch's requests up where they are others than the last time."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._last: KnownBatch | None = None

    def of(self, rids: tuple[str, ...], rows: int) -> KnownBatch:
        """Return the requests of a batch of `rows` rows, padding included."""
        last = self._last
        if last is not None and last.rows == rows and last.version == self._book.version and last.rids == rids:
            return last
        known = [self._book.get(rid) for rid in rids[:rows]]
        requests = [request for request in known if request is not None]
        whole = len(requests) == len(known)
        lists = [request.lists() for request in requests if whole]
        found = self._last = KnownBatch(  # the recorder's thread may forget it at once
            rids=rids,
            rows=rows,
            version=self._book.version,
            ids=self._book.ids(rids, rows),
            requests=requests if whole else (),
            lists=lists if whole else None,
            prompt_lens=np.array([len(one.prompt) for one in lists], np.int64),
            outputs=[one.output for one in lists],
        )
        return found

    def refresh(self) -> None:
        """Look again where the scheduler keeps tokens in other lists than before; for the recorder's thread."""
        last = self._last
        if last is None or last.lists is None:
            return
        for one, (prompt, output) in zip(last.lists, map(_LISTS, last.requests), strict=True):
            if one.prompt is not prompt or one.output is not output:
                self._last = None
                return


def device_forward(batch: Any, *, runner: RunnerLayout, known: KnownBatch) -> DeviceForward:
    """Return what a forward is about to read and write, in the engine's own tensors.

    Raises:
        ValueError: a mode that the adapter does not know, or a batch without token ids.
    """
    mode = MODES.get(batch.forward_mode.name)
    if mode is None:
        raise ValueError(f"forward mode {batch.forward_mode.name}, expected one of {', '.join(MODES)}")
    rows = batch.req_pool_indices
    positions = rows[:0] if batch.positions is None else batch.positions
    if batch.input_ids is None and positions.shape[0]:
        raise ValueError("the batch has embeddings instead of token ids, which a trace cannot hold")
    ids = rows[:0] if batch.input_ids is None else batch.input_ids
    minus, extend, each = None, None, 1
    # A decode goes by positions: EAGLE's draft leaves seq_lens as they were before the first of its steps.
    if mode in ("decode", "idle"):
        prefix = positions
    elif mode == "target_verify":
        prefix, each = batch.seq_lens, int(batch.spec_info.draft_token_num)
    else:
        extend = batch.extend_seq_lens.contiguous()
        prefix = batch.seq_lens if mode == "draft_extend" else batch.extend_prefix_lens
        minus = extend if mode == "draft_extend" else None
    return DeviceForward(
        mode=mode,
        runner=runner.index,
        rows=rows.contiguous(),
        prefix=prefix.contiguous(),
        minus=minus,
        extend=extend,
        extend_each=each,
        input_ids=ids.contiguous(),
        positions=positions.contiguous(),
        out_cache_loc=rows[:0] if batch.out_cache_loc is None else batch.out_cache_loc.contiguous(),
        num_tokens=min(int(ids.shape[0]), int(positions.shape[0])),
        request_ids=known.ids,
        truth=known.lists,
        truth_lens=list(map(len, known.outputs)),
        known_lens=known.prompt_lens,
    )
