"""One token's attention, laid aside on the device: its query and output in one head of a layer, and K and V of its request there.

The launch stands right behind a layer's attention, in CUDA graphs too. A graph launches with the arguments that it was captured
with, so what is wanted lies in device memory: `wanted`, zeros for nothing. What was laid aside is in `found` and `rows`.
"""

from typing import Any, Final, NamedTuple

import triton

from .frame_probe import probe_kernel
from .model_forward import launches_on

# Words of `wanted`: not 0 if anything is, whose request of the batch, in which head of K and V and which of the queries, and
# whether it is the request's first token of the forward or its last.
WANTED_WORDS: Final = 5
# Words of `found`: the first of `wanted`; the layer; the request, its first token among those of the forward and the one that was
# looked at; how many positions attention is told that it has.
FOUND_WORDS: Final = 6
FOUND, LAYER, REQUEST, BEGIN, TOKEN, LENGTH = range(FOUND_WORDS)
PROGRAMS: Final = 128
_TILE: Final = 16  # positions at once


class ProbeMemory(NamedTuple):
    """Where a probe's wants and finds lie: `wanted` `[WANTED_WORDS]` and `found` `[FOUND_WORDS]` int64.

    `rows` `[2 + 2 * positions, width]` are query and output, then K and V of so many positions.
    """

    wanted: Any
    found: Any
    rows: Any

    @property
    def positions(self) -> int:
        """Of how many positions K and V fit."""
        return int(self.rows.shape[0]) // 2 - 1


class PagedHalf(NamedTuple):
    """K or V of a layer's pool, as `rows`' type: `[blocks, slots of a block, heads, dim]`, the last of them side by side."""

    values: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Blocks, slots of a block, heads, values of a head."""
        return tuple(int(n) for n in self.values.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """From block to block, from slot to slot, from head to head."""
        return tuple(int(n) for n in self.values.stride())[:3]


class ProbedCall(NamedTuple):
    """What a layer's attention was called with, all on the device: `query` and `output` `[tokens, heads, dim]`.

    Request r has the row `rows[r]` of `table` `[any, columns]`, r itself if that is None, whose entries stand for `page_size`
    slots each; `lens[r]` positions; and the tokens from `starts[r]` to before `starts[r + 1]`, if that is None the one `r`.
    """

    query: Any
    output: Any
    table: Any
    page_size: int
    lens: Any
    starts: Any | None = None
    rows: Any | None = None


def launch_probe(memory: ProbeMemory, call: ProbedCall, keys: PagedHalf, values: PagedHalf, layer: int) -> None:
    """Launch what lays a token of this call aside, if one is wanted, on the current stream."""
    rows = call.lens if call.rows is None else call.rows
    starts = call.lens if call.starts is None else call.starts
    width, dims = int(memory.rows.shape[1]), (keys.shape[3], values.shape[3])
    requests = min(int(rows.numel()), int(call.lens.numel()), int(starts.numel()) - (call.starts is not None))
    bounds = (requests, min(int(call.query.shape[0]), int(call.output.shape[0])), *map(int, call.table.shape))
    sizes = (layer, memory.positions, width, call.page_size, int(call.table.stride(0)))
    pool = (*keys.shape[:2], *keys.strides, *values.strides)
    tokens = (*_outer(call.query), *_outer(call.output), *dims)
    launches_on(memory.wanted).launch(
        probe_kernel,
        PROGRAMS,
        (
            *(
                memory.wanted,
                memory.found,
                memory.rows,
                call.query,
                call.output,
                keys.values,
                values.values,
                call.table,
            ),
            (rows, starts, call.lens),
            *(bounds, sizes, pool, tokens),
        ),
        (call.rows is not None, call.starts is not None, triton.next_power_of_2(max(dims)), _TILE),
    )


def _outer(tokens: Any) -> tuple[int, int]:
    return int(tokens.stride(0)), int(tokens.stride(1))
