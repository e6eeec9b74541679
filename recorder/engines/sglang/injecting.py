"""An entry of SGLang's `req_to_token` that points elsewhere for one forward; see `common/injecting.py`."""

from typing import Any

from ...capture.host_arrays import own_int64
from ..common.injecting import Injector, Undo, put_entry
from .forward import mode_of, prefix_and_extend
from .layout import RunnerLayout
from .recording import SglangRecording


def redirect(injector: Injector, recording: SglangRecording, layout: RunnerLayout, batch: Any) -> Undo | None:
    """Change the table before a forward of the target, if it is time; return what puts it back, None if nothing was done."""
    if not injector.redirects():
        return None
    mode, bs = mode_of(batch.forward_mode), int(batch.req_pool_indices.numel())
    if layout.index or mode not in ("extend", "decode", "mixed") or not batch.rids:
        return None
    known, rows = recording.batches.of(batch.rids, bs), batch.req_pool_indices.tolist()
    prefix, _ = prefix_and_extend(batch, mode, bs, own_int64(batch.positions))
    table: Any = recording.layout.tables[layout.table]
    slots = [table[row, : int(prefix[r])].tolist() if row else [] for r, row in enumerate(rows)]
    cells = [(r, position, slot) for r, of_row in enumerate(slots) for position, slot in enumerate(of_row)]

    def point(r: int, position: int, slot: int) -> Undo:
        return put_entry(table, (rows[r], position), slot)

    return injector.redirect(batch.rids, known.ids.tolist(), cells, 1, point)
