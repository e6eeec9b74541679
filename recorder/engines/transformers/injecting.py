"""A page of a request that is another one for one step, in its table and in what attention reads; see `common/injecting.py`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...capture.host_arrays import own_int64
from ..common.injecting import Injector, Undo, put_entry
from .layout import TransformersGroup


def redirect(
    injector: Injector, layouts: Sequence[TransformersGroup], io: Any, request_ids: Sequence[int]
) -> Undo | None:
    """Change what a step is about to read, if it is time; return what puts the table back, None if nothing was done."""
    if not injector.redirects():
        return None
    layout = next((layout for layout in layouts if not layout.ring_size), None)
    if layout is None or io.use_block_table or not io.max_kv_read:
        return None
    page, batch = layout.page_size, io.requests_in_batch
    names = [future.state.request_id for future in batch]
    whole = [(future.state.position_offset - future.query_length) // page for future in batch]
    tables = [layout.table(name) for name in names]
    found = zip(tables, whole, strict=True)
    cells = [(r, column, table[column]) for r, (table, count) in enumerate(found) for column in range(count)]
    begins = own_int64(io.cumulative_seqlens_k[layout.allocator.layer_type][: len(batch) + 1])

    def point(r: int, column: int, block: int) -> Undo:
        import torch

        begin = int(begins[r]) + column * page
        rows = torch.from_numpy(block * layout.stride + np.arange(page))
        io.read_index_storage[layout.index, begin : begin + page].copy_(rows)
        return put_entry(tables[r], column, block)

    return injector.redirect(names, request_ids, cells, page, point, layout.index)
