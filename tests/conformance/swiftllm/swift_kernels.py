"""swiftLLM's kernels in plain torch, over the tables, lengths and ids that they are given: each for all of its grid at once."""

import importlib
from itertools import pairwise
from math import log
from typing import Any

import torch
from torch import Tensor


class _Kernel:
    """In the place of a kernel of Triton."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __getitem__(self, _: Any) -> Any:
        return self.run


def _set_blocks(table: Any, new: Any, seqs: Any, allocated: Any, needed: Any, ends: Any, _: int) -> None:
    for seq, count, end in zip(seqs.tolist(), needed.tolist(), ends.tolist(), strict=True):
        have = int(allocated[seq])
        table[seq, have : have + count] = new[end - count : end]
        allocated[seq] = have + count


def _unset_blocks(allocated: Tensor, table: Tensor, seqs: Tensor, free: Tensor, *_: Any) -> None:
    for seq in seqs.tolist():
        free[table[seq, : int(allocated[seq])].long()] = True
        allocated[seq] = 0


def _gather_blocks(allocated: Any, table: Any, seqs: Any, free: Any, ends: Any, out: Any, _: int) -> None:
    for seq, end in zip(seqs.tolist(), ends.tolist(), strict=True):
        out[end - int(allocated[seq]) : end] = table[seq, : int(allocated[seq])]
    _unset_blocks(allocated, table, seqs, free)


def _places(table: Tensor, seq: int, positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return table[seq].long()[positions // block], positions % block


def _store_prompts(keys: Any, values: Any, k: Any, v: Any, table: Any, seqs: Any, *given: Any) -> None:
    starts, lens, layer = given[:3]
    for seq, start, length in zip(seqs.tolist(), starts.tolist(), lens.tolist(), strict=False):
        blocks, offsets = _places(table, seq, torch.arange(length), keys.shape[3])
        for half, rows in ((keys, k), (values, v)):
            half[blocks, layer, :, offsets] = rows[start : start + length]


def _store_tokens(keys: Any, values: Any, k: Any, v: Any, table: Any, seqs: Any, *given: Any) -> None:
    lens, layer = given[:2]
    for row, (seq, length) in enumerate(zip(seqs.tolist(), lens.tolist(), strict=True)):
        blocks, offsets = _places(table, seq, torch.tensor([length - 1]), keys.shape[3])
        for half, rows in ((keys, k), (values, v)):
            half[blocks, layer, :, offsets] = rows[row]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the last `len(q)` tokens over all of theirs, `[tokens, heads, dim]`."""
    k, v = (half.float().repeat_interleave(q.shape[1] // half.shape[1], dim=1) for half in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


def _decode(out: Any, _: Any, q: Any, keys: Any, values: Any, table: Any, scale: float, *given: Any, **__: Any) -> None:
    """Paged attention in one piece: what the first kernel finds of each piece lies in the first."""
    lens, seqs, layer = given[0], given[1], given[3]
    for row, (seq, length) in enumerate(zip(seqs.tolist(), lens.tolist(), strict=True)):
        blocks, offsets = _places(table, seq, torch.arange(length), keys.shape[3])
        k, v = (half[blocks, layer, :, offsets] for half in (keys, values))
        out[row, :, 0] = _attend(q[row : row + 1], k, v, scale * log(2))[0]  # the kernel takes powers of 2


def _gathered(out: Tensor, _: Tensor, to: Tensor, *__: Any) -> None:
    to.copy_(out[:, :, 0].reshape(to.shape))


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *_: Any, softmax_scale: float, causal: bool
) -> Tensor:
    """`flash_attn_varlen_func`, over K and V as they come from the layer."""
    out, ends = torch.empty_like(q), starts.tolist()
    for mine in (slice(*pair) for pair in pairwise(ends)):
        out[mine] = _attend(q[mine], k[mine], v[mine], softmax_scale).to(q.dtype)
    return out


def _norm(x: Tensor, weight: Tensor, eps: float, _: int) -> None:
    rows = x.float()
    x.copy_(rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, size: int) -> None:
    x += residual
    residual.copy_(x)
    _norm(x, weight, eps, size)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> None:
    for one in (q, k):
        low, high = one.clone().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        one.copy_(torch.cat((low * c - high * s, low * s + high * c), -1))


def _silu(x: Tensor, size: int, _: int) -> None:
    x[:, :size] *= torch.nn.functional.silu(x[:, size:].float()).to(x.dtype)


def swap_blocks(src: list[int], dst: list[int], swap_in: bool, keys: Tensor, values: Tensor, *host: Tensor) -> None:
    """Copy blocks to the host and back, as csrc does."""
    for pool, swapped in zip((keys, values), host, strict=True):
        (pool if swap_in else swapped)[dst] = (swapped if swap_in else pool)[src]


def put() -> None:
    """Put them in the place of the kernels; swiftLLM's are imported here."""
    kernels = {
        "block_mgmt.set_block_table_and_num_seq_alloc_blocks_kernel": _set_blocks,
        "block_mgmt.unset_block_table_and_num_seq_alloc_blocks_kernel": _unset_blocks,
        "block_mgmt.gather_allocated_blocks_and_unset_kernel": _gather_blocks,
        "kvcache_mgmt.kvcache_mgmt_prefill_kernel": _store_prompts,
        "kvcache_mgmt.kvcache_mgmt_decoding_kernel": _store_tokens,
        "paged_attn.paged_attention_phase1": _decode,
        "paged_attn.paged_attention_phase2": _gathered,
        "rmsnorm.rmsnorm": _norm,
        "rmsnorm.fused_add_rmsnorm": _add_norm,
        "rotary_emb.rotary_embedding": _rotate,
        "silu_and_mul.silu_and_mul": _silu,
    }
    for name, run in kernels.items():
        module, kernel = name.split(".")
        setattr(importlib.import_module(f"swiftllm.worker.kernels.{module}"), f"_fwd_{kernel}", _Kernel(run))
