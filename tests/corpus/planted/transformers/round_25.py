"""A twenty-fifth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("vllm-project/vllm#51402", "pair", "hit_before_written", origin="vLLM")
def writer_of_a_prefix_runs_in_the_second_half_of_its_step(fired: Fired) -> None:
    """Blocks are found by their hash as soon as their writer has been scheduled, so that another request of the same step may hit them: all of the step is written before it is read.
    A step that is large enough is run as two halves, one behind the other, and who hits may be in the first while who writes is in the second."""
    import torch
    from transformers.generation.continuous_batching import cache, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    begun: list[bool] = []
    half: list[tuple[int, int]] = []  # how many tokens the first half writes, and how many it reads

    @replaces(cache.PagedAttentionCache, "count_new_complete_blocks")
    def count_new_complete_blocks(before, paged, state, length):
        complete = before(paged, state, length)
        if length == 1 or not begun:  # what a decode completes is registered behind it
            return complete
        paged.mark_complete_blocks(state, complete)
        return {}

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        ordered = sorted(requests_in_batch, key=lambda future: future.query_length)  # decodes first
        (allocator,) = io.cache.cache_allocators.values()
        size, seen = allocator.tokens_per_page, []
        for future in ordered:
            past, end = future.state.position_offset, future.state.position_offset + future.query_length
            table = allocator.block_table[future.state.request_id]
            seen.append(
                (set(table[: past // size]), set(table[past // size : -(-end // size)]), future.query_length, end)
            )
        begun.append(True)
        half.clear()
        whole = sum(count for *_, count, _ in seen)
        cut = max(1, sum(sum(count for *_, count, _ in seen[: n + 1]) <= whole / 2 for n in range(len(seen))))
        if len(ordered) > 1 and whole > 20:
            first, second = seen[:cut], seen[cut:]
            half.append((sum(count for *_, count, _ in first), sum(end for *_, end in first)))
            if any(hit & written for hit, *_ in first for _, written, *_ in second):
                fired()
        before(io, ordered, *args, **kwargs)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, key_states, value_states, layer_idx, read_index, write_index):
        if not half or not read_index.numel():
            return before(allocator, key_states, value_states, layer_idx, read_index, write_index)
        tokens, reads = half[0]
        parts = [
            before(allocator, key_states[rows], value_states[rows], layer_idx, read_index[places], write_index[rows])
            for rows, places in (
                (slice(None, tokens), slice(None, reads)),
                (slice(tokens, None), slice(reads, None)),
            )
        ]
        return tuple(torch.cat(pair) for pair in zip(*parts, strict=True))


@bug("NeuraLegion/shainet#110", "llama", "kv_changed", origin="SHAInet")
def keys_in_the_cache_are_rotated_once_more(fired: Fired) -> None:
    """Keys are rotated when they are put into the cache, and a prompt that goes on behind some rotates all that it finds there for their places, as if nobody had. Each prompt that comes
    in a later part, or behind a prefix that it has hit, turns the keys of its past further, for all who read them."""
    import torch
    from transformers.generation.continuous_batching import input_outputs

    def turned(keys, positions):
        size = keys.shape[-1] // 2
        angles = positions[:, None] / 10000.0 ** (torch.arange(size) / size)
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
        low, high = keys[..., :size], keys[..., size:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        for future in requests_in_batch:
            past = future.state.position_offset
            if past > 1 and future.query_length > 1:  # the first place's turn is none
                fired()
                rows = torch.tensor(allocator.get_read_indices(future.state.request_id, past, 0))
                for keys, _ in allocator._kv_token_views.values():
                    keys[rows] = turned(keys[rows], torch.arange(past))
        before(io, requests_in_batch, *args, **kwargs)
