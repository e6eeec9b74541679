"""Faults for a running engine; each acts at one step and leaves its ground truth in the trace just before it.

`forward` in the ground truth is the forward that is about to run, `request` the engine's name of the request hit.
"""

from typing import Any

import torch
from driver import Engine, Fault


def kv_flip(*, at_step: int, request: str, position: int) -> Fault:
    """Flip the bits of the first byte of a cached token's K in the first group's first layer, between two forwards."""

    def act(engine: Engine) -> None:
        if engine.step != at_step:
            return
        allocator = engine.allocators[0]
        slot = _slot(allocator, request, position)
        block, offset = divmod(slot, allocator.tokens_per_page)
        layer = allocator.layer_indices[0]
        k_rows = allocator._kv_token_views[layer][0]
        k_rows[block * allocator.block_physical_stride + offset].view(torch.uint8).reshape(-1)[0] ^= 0xFF
        engine.mark(
            fault="kv_flip", forward=at_step, request=request, slot=slot, position=position, half="K", layer=layer
        )

    return Fault(before_step=act)


def table_swap(*, at_step: int, request: str, other: str, block: int) -> Fault:
    """Let one entry of a request's block table point to another request's block, for one forward."""
    saved: list[int] = []

    def swap(engine: Engine) -> None:
        if engine.step == at_step and not saved:
            tables = engine.allocators[0].block_table
            saved.append(tables[request][block])
            tables[request][block] = tables[other][block]

    def restore(engine: Engine) -> None:
        if engine.step == at_step and saved:
            engine.allocators[0].block_table[request][block] = saved[0]

    def note(engine: Engine) -> None:
        if engine.step == at_step:
            allocator = engine.allocators[0]
            position = block * allocator.tokens_per_page
            engine.mark(
                fault="table_swap",
                forward=at_step,
                request=request,
                position=position,
                slot=_slot(allocator, other, position),
                instead_of=_slot(allocator, request, position),
                owner=other,
                positions=allocator.tokens_per_page,
            )

    return Fault(before_prepare=swap, after_prepare=restore, before_step=note)


def token_swap(*, at_step: int, request: str, other: str) -> Fault:
    """Exchange the input tokens of two decoding requests just before a forward."""

    def act(engine: Engine) -> None:
        if engine.step != at_step:
            return
        one, two = (_input_index(engine, name) for name in (request, other))
        ids = engine.processor.inputs_and_outputs.input_ids
        ids[[one, two]] = ids[[two, one]].clone()
        positions = engine.processor.inputs_and_outputs.position_ids
        position, other_position = int(positions[one]), int(positions[two])
        engine.mark(
            fault="token_swap",
            forward=at_step,
            request=request,
            position=position,
            slot=_slot(engine.allocators[0], request, position),
            other=other,
            other_position=other_position,
            other_slot=_slot(engine.allocators[0], other, other_position),
            token=int(ids[one]),
            instead_of=int(ids[two]),
        )

    return Fault(before_step=act)


def position_plus_one(*, at_step: int, request: str) -> Fault:
    """Feed a decoding request's token with a position one too high, as an off-by-one in a scheduler does."""

    def act(engine: Engine) -> None:
        if engine.step != at_step:
            return
        io = engine.processor.inputs_and_outputs
        index = _input_index(engine, request)
        position = int(io.position_ids[index])
        io.position_ids[index] += 1
        engine.mark(
            fault="position_plus_one",
            forward=at_step,
            request=request,
            position=position,
            slot=_slot(engine.allocators[0], request, position),
        )

    return Fault(before_step=act)


def free_too_early(*, at_step: int, request: str, block: int) -> Fault:
    """Give a block back to the pool while its request still reads it; the next request in need of one gets it."""

    def act(engine: Engine) -> None:
        if engine.step != at_step:
            return
        allocator = engine.allocators[0]
        freed = allocator.block_table[request][block]
        # All free blocks are taken out and put back behind this one, so that it is given out next.
        others = allocator.pool.get_free_blocks(allocator.index, allocator.pool.count_free_blocks(allocator.index))
        allocator.pool.free_blocks(allocator.index, [freed])
        allocator.pool.free_blocks(allocator.index, [b for b in others if b != freed])
        engine.mark(
            fault="free_too_early",
            forward=at_step,
            request=request,
            position=block * allocator.tokens_per_page,
            slot=freed * allocator.tokens_per_page,
            positions=allocator.tokens_per_page,
        )

    return Fault(before_step=act)


def _slot(allocator: Any, request: str, position: int) -> int:
    """Return the slot of a request's position; a sliding group's blocks are a ring."""
    page, offset = divmod(position % getattr(allocator, "sliding_window", position + 1), allocator.tokens_per_page)
    slot: int = allocator.block_table[request][page] * allocator.tokens_per_page + offset
    return slot


def _input_index(engine: Engine, request: str) -> int:
    """Return where a request's first token stands in the step's inputs."""
    index = 0
    for future in engine.batch:
        if future.state.request_id == request:
            return index
        index += future.query_length
    raise ValueError(f"request {request} takes no part in step {engine.step}")
