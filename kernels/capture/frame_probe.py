"""The kernel that lays one token's attention aside on the device; `attention_probe` launches it."""

import triton.language as tl

from .frame_kernels import device_kernel


@device_kernel(13)
def probe_kernel(
    wanted, found, rows, query, output, keys, values, table, lens, bounds, sizes, pool, tokens, HAS_ROWS: tl.constexpr,
    HAS_STARTS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lay a token aside, if one is wanted; the numbers as `launch_probe` has them. A slot that the pool has not holds no numbers, and
    of a request or token that the call has not nothing is laid aside: an engine may be wrong.
    """
    rows_in, starts_in, lens_in = lens
    num_requests, num_tokens, table_rows, columns = bounds
    layer, positions, width, page_size, table_stride = sizes
    blocks, block_size, k_block, k_slot, k_head, v_block, v_slot, v_head = pool
    q_token, q_head, o_token, o_head, k_dim, v_dim = tokens
    stamp, request = tl.load(wanted), tl.load(wanted + 1)
    if (stamp != 0) & (request >= 0) & (request < num_requests):
        kv_head, head = tl.load(wanted + 2), tl.load(wanted + 3)
        length = tl.load(lens_in + request).to(tl.int64)
        row = request
        if HAS_ROWS:
            row = tl.load(rows_in + request).to(tl.int64)
        begin = request
        token = request
        if HAS_STARTS:
            begin = tl.load(starts_in + request).to(tl.int64)
            token = tl.where(tl.load(wanted + 4) != 0, begin, tl.load(starts_in + request + 1).to(tl.int64) - 1)
        lane = tl.arange(0, DIM)
        # One whose row ends before it does is as one that is too long.
        length = tl.where(length > columns * page_size, positions + 1, length)
        held = length
        is_there = (token >= 0) & (token < num_tokens) & (row >= 0) & (row < table_rows)
        if (length > positions) | (is_there == 0):
            held = length * 0
        program = tl.program_id(0).to(tl.int64)
        for first in range(program * TILE, held, tl.num_programs(0) * TILE):
            position = first + tl.arange(0, TILE).to(tl.int64)
            here = position < held
            entry = tl.load(table + row * table_stride + position // page_size, mask=here, other=0).to(tl.int64)
            slot = entry * page_size + position % page_size
            there = here & (slot >= 0) & (slot < blocks * block_size)
            block, inside = slot // block_size, slot % block_size
            at = block * k_block + inside * k_slot + kv_head * k_head
            own = lane[None, :] < k_dim
            k = tl.load(keys + at[:, None] + lane[None, :], mask=there[:, None] & own, other=float("nan"))
            tl.store(rows + (2 + position)[:, None] * width + lane[None, :], k, mask=here[:, None] & own)
            at = block * v_block + inside * v_slot + kv_head * v_head
            own = lane[None, :] < v_dim
            v = tl.load(values + at[:, None] + lane[None, :], mask=there[:, None] & own, other=float("nan"))
            tl.store(rows + (2 + positions + position)[:, None] * width + lane[None, :], v, mask=here[:, None] & own)
        if (program == 0) & is_there:
            q = tl.load(query + token * q_token + head * q_head + lane, mask=lane < k_dim, other=0.0)
            tl.store(rows + lane, q, mask=lane < k_dim)
            o = tl.load(output + token * o_token + head * o_head + lane, mask=lane < v_dim, other=0.0)
            tl.store(rows + width + lane, o, mask=lane < v_dim)
            tl.store(found + 1, request * 0 + layer)
            tl.store(found + 2, request)
            tl.store(found + 3, begin)
            tl.store(found + 4, token)
            tl.store(found + 5, length)
            tl.store(found, stamp)
