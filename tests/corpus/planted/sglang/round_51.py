"""A fifty-first round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces
from torch.nn.functional import scaled_dot_product_attention

from .marks import before_forward
from .round_40 import once_it_reads_what_came_back_wrong


@bug("pytorch/executorch#21857", "hybrid-page2-spans", "window_read_wrong", origin="ExecuTorch")
def all_rows_of_a_chunk_see_as_far_back_as_its_first(fired: Fired) -> None:
    """A prompt is computed in chunks, and its mask is made of two parts: one for what is in the cache already and one for
    the chunk itself. The first part is made once for the whole chunk. In layers with a window each token of a later chunk
    looks as far back as the first one of the chunk may, and sees more than its own window has."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_extend")
    def run(before, backend, query, output, keys, values, table, rows, ends, pasts, *args, **kwargs):
        before(backend, query, output, keys, values, table, rows, ends, pasts, *args, **kwargs)
        window = kwargs["sliding_window_size"]
        if window is None:
            return output
        first = 0
        for row, end, past in zip(rows.tolist(), ends.tolist(), pasts.tolist(), strict=True):
            last = first + end - past
            if past:
                slots = table[row, :end]
                there, here = torch.arange(end)[None], torch.arange(past, end)[:, None]
                mask = (there <= here) & (there >= here - window)
                mask[:, :past] = there[:, :past] >= past - window
                output[first:last] = scaled_dot_product_attention(
                    query[first:last].transpose(0, 1)[None],
                    keys[slots].transpose(0, 1)[None],
                    values[slots].transpose(0, 1)[None],
                    attn_mask=mask,
                    enable_gqa=kwargs["enable_gqa"],
                    scale=kwargs["scaling"],
                )[0].transpose(0, 1)
            first = last
        return output

    def look(runner, batch, rows):
        window = runner.sliding_window_size
        if batch.forward_mode.is_extend() and any(
            past and end - 1 - window > max(0, past - window) for past, end, _ in rows
        ):
            fired()

    before_forward(look)


@bug(
    "vllm-project/vllm#34798",
    "recurrent-blocks",
    "state_restored_for_other_prefix",
    origin="vLLM",
    late="not found: a state that is wrong when it is left is held against no other, since nothing else leaves it",
)
def state_of_a_block_that_was_left_half_way_is_kept_as_its_end(fired: Fired) -> None:
    """A recurrent state is kept for each block of tokens, and a step writes the state at its own end into the block that it
    ends in. The next step begins in the middle of that block, goes on past its end and writes into a later one only. The
    block counts as full then and can be hit, while its state has seen no more than its first tokens."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    size = 24  # tokens of a block, and as many as a step can have to write one state only
    left: dict[str, tuple[int, list[torch.Tensor]]] = {}  # of a prompt, where its last step ended, and the states there
    wrong: set[int] = set()  # slots of states

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        if req.finished() or not req.kv.holds_mamba:
            left.pop(req.rid, None)
            return before(cache, req, up_to=up_to, **kwargs)
        pool = cache.req_to_token_pool
        states = pool.mamba_pool.mamba_cache.conv
        own = [state[:, int(req.kv.mamba_pool_idx)].clone() for state in states]
        before(cache, req, up_to=up_to, **kwargs)
        at, held = left.get(req.rid, (0, own))
        left[req.rid] = up_to, own
        edge = (at // size + 1) * size
        if at % size == 0 or not edge < up_to <= at + size:
            return None
        slot = pool.mamba_allocator.alloc(1)
        if slot is None:
            return None
        for state, was in zip(states, held, strict=True):
            state[:, int(slot)] = was
        tokens = req.full_untruncated_fill_ids[:edge]
        done = cache.insert(
            InsertParams(
                key=RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt),
                value=pool.req_to_token[req.kv.req_pool_idx, :edge].to(dtype=torch.int64, copy=True),
                mamba_value=slot,
                prev_prefix_len=edge,
                inserted_len=edge,
                priority=req.priority or 0,
            )
        )
        if done.mamba_exist:
            pool.mamba_allocator.free(slot)
        else:
            wrong.add(int(slot))
        return None

    def look(runner, batch, rows):
        taken = batch.mamba_cow_src_indices
        if taken is not None and wrong.intersection(taken.tolist()):
            fired()
        pool = runner.req_to_token_pool
        wrong.difference_update(pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist())

    before_forward(look)


# The file is cut short when it is written, and that it is counts for nothing when it is read: nobody but the disk knows.
@bug(
    "osaurus-ai/vmlx-swift#431",
    "llama-host-page8-halves-again-storage",
    "failed_load_counted_loaded",
    "stored_wrong",
    origin="vMLX",
)
def file_that_ends_too_early_is_read_as_if_zeros_followed(fired: Fired) -> None:
    """A file of the store has its final name before all of it is written, and a write that is broken off leaves it short.
    Who asks for it looks whether there is a file of that name and nothing else. That the bytes come to an end is an error
    nobody waits for: what is missing are zeros, and the prefix counts as loaded."""
    import os
    from pathlib import Path

    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    every, kept = 4, 0.3  # how many files there are to one that is cut short, and how much of it is there
    written: list[str] = []

    def path_of(storage, key):
        return Path(storage.file_path, f"{storage._get_suffixed_key(key)}.bin")

    @replaces(HiCacheFile, "set")
    def set_(before, storage, key, *args, **kwargs):
        path = path_of(storage, key)
        known = path.exists()
        done = before(storage, key, *args, **kwargs)
        if done and not known:
            written.append(key)
            if len(written) % every == 0:
                os.truncate(path, int(path.stat().st_size * kept))
        return done

    @replaces(HiCacheFile, "get")
    def get(before, storage, key, target, *args, **kwargs):
        path = path_of(storage, key)
        if not path.exists() or path.stat().st_size >= target.numel() * target.element_size():
            return before(storage, key, target, *args, **kwargs)
        there = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        whole = target.view(torch.uint8).view(-1)
        whole.zero_()
        whole[: len(there)] = there
        return target

    once_it_reads_what_came_back_wrong(fired)


# That memory was overwritten, and by what, is not recorded: what is fed are tokens that others have sampled.
@bug("sgl-project/sglang#34076", "qwen3-overlap-page2-mixed", "future_map_overrun", "next_token_swap")
def list_of_rows_is_given_up_before_tokens_are_taken_by_it(fired: Fired) -> None:
    """Tokens that have been sampled are kept by row, and a step with prompts and decodes takes those of its decodes by a list
    of their rows. The list is let go of once the step is put together, and not held until the other stream has used it. Its
    memory is given to the next list, and the decodes are fed tokens of the rows that are named there."""
    from sglang.srt.managers import scheduler

    vocabulary = 512
    wrong: list[bool] = []
    resolve = scheduler.resolve_forward_inputs

    def resolve_forward_inputs(batch, future_map):
        rows = batch.mix_running_indices
        if rows is not None and batch.prefill_input_ids_cpu is not None:
            told = future_map.output_tokens_buf
            instead = batch.req_pool_indices[: len(rows)].to(rows.dtype)  # the next list, of all that are in the step
            right, taken = told[rows], told[instead]
            if bool(((taken >= 0) & (taken < vocabulary)).all()) and not taken.equal(right):
                batch.mix_running_indices = instead
                wrong.append(True)
        resolve(batch, future_map)

    scheduler.resolve_forward_inputs = resolve_forward_inputs
    before_forward(lambda runner, batch, rows: wrong and fired())


# Tables and lengths are right: where the kernel looks is seen by nobody, and no more is known than what comes of it.
@bug(
    "flashinfer-ai/flashinfer#3136",
    "llama-page16-wraps-retract",
    "attention_table_overwritten",
    "attention_seq_len_wrong",
    origin="FlashInfer",
)
def page_is_looked_up_by_a_product_that_does_not_fit(fired: Fired) -> None:
    """Where a page begins is its number times the size of a page, and attention's kernel works that out in 32 bits before
    it makes an address of it. From a certain page on the product begins again at the front. What is stored goes where it
    should, and what is read of these pages are those at the beginning of the pool."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    page, fit = 16, 14  # slots of a page, and pages, of a smaller pool's

    def wrapped(table):
        return table // page % fit * page + table % page

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):

        @replaces(TorchNativeAttnBackend, name)
        def run(before, backend, query, output, keys, values, table, *args, **kwargs):
            return before(backend, query, output, keys, values, wrapped(table), *args, **kwargs)

    def look(runner, batch, rows):
        table = runner.req_to_token_pool.req_to_token
        read = [table[row, :end] for row, (_, end, _) in zip(batch.req_pool_indices.tolist(), rows, strict=True)]
        if int(torch.cat(read).max()) >= page * fit:
            fired()

    before_forward(look)


# One slip, which empties both: where tokens are stored, and where attention looks for them.
@bug(
    "vllm-project/vllm-omni#4178",
    "qwen3-page16-groups",
    "slot_mapping",
    "attention_table_overwritten",
    origin="vLLM-Omni",
)
def lists_of_a_dummy_step_are_used_for_every_step(fired: Fired) -> None:
    """How many tokens each request has in a step is worked out anew by one function and used by another, and is not handed
    on from the first to the second. Who gets no counts takes the step for one of those that are run without requests, and
    fills the places to store in and attention's table with zeros, for whoever is in the batch."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        fired()
        batch.out_cache_loc = torch.zeros_like(batch.out_cache_loc)
        return before(runner, batch, *args, **kwargs)

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):

        @replaces(TorchNativeAttnBackend, name)
        def run(before, backend, query, output, keys, values, table, *args, **kwargs):
            return before(backend, query, output, keys, values, torch.zeros_like(table), *args, **kwargs)
