"""An entry of vLLM's block table that points elsewhere for one step; see `common/injecting.py`."""

from collections.abc import Sequence
from typing import Any

from ..common.injecting import Injector, Undo, put_entry
from ..common.requests import request_id_of
from .layout import VllmGroup


def redirect(injector: Injector, runner: Any, groups: Sequence[VllmGroup]) -> Undo | None:
    """Change the table before the V1 runner's forward, if it is time; return what puts it back, None if nothing was done."""
    if not injector.redirects():
        return None
    batch = runner.input_batch
    group = next((group for group in groups if not group.window), None)
    if group is None:
        return None
    names, table = list(batch.req_ids), batch.block_table[group.gid].block_table.gpu
    whole = [int(batch.num_computed_tokens_cpu[row]) // group.block_size for row in range(len(names))]
    blocks = [table[row, :count].tolist() for row, count in enumerate(whole)]
    cells = [(row, column, block) for row, of_row in enumerate(blocks) for column, block in enumerate(of_row)]
    ids = [request_id_of(name) for name in names]

    def point(row: int, column: int, block: int) -> Undo:
        return put_entry(table, (row, column), block)

    return injector.redirect(names, ids, cells, group.block_size, point, group.index)
