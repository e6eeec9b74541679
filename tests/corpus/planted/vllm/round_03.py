"""A third round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import itertools

from bugs import Fired, bug, replaces


@bug("tenstorrent/tt-xla#4190", "hybrid", "slot_mapping", "shared_page_written", origin="tt-xla")
def suffix_filled_from_the_shared_block(fired: Fired) -> None:
    """The K and V of a prompt's uncached end are filled in beginning at the first block of its table, which is the shared
    prefix, instead of behind it. Other requests read them there."""
    from vllm.v1.worker.block_table import BlockTable

    fresh: set[int] = set()

    @replaces(BlockTable, "add_row")
    def add_row(before, table, block_ids, row):
        before(table, block_ids, row)
        fresh.add(row)

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        for row, (first, end) in enumerate(itertools.pairwise(starts[: num_reqs + 1].tolist())):
            offset = int(positions[first])
            if row in fresh and offset >= table.block_size:
                fired()
                for at in range(first, end):
                    place = int(positions[at]) - offset
                    block = int(table.block_table.np[row, place // table.block_size])
                    table.slot_mapping.gpu[at] = block * table.block_size + place % table.block_size
            if end - first:
                fresh.discard(row)
