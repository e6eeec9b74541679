"""A thirty-first round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "huggingface/candle#3520",
    "qwen-far",
    "not_of_the_model",
    origin="Candle",
)
def positions_are_rounded_before_they_are_turned_into_angles(fired: Fired) -> None:
    """The places of the tokens are cast to the model's short floats before the angles are made of them. Up to 256 all of them are exact; behind that every other one is its neighbour's, so that keys are turned as if they
    stood one place beside their own."""
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    @replaces(Qwen3RotaryEmbedding, "forward")
    def forward(before, rotary, x, position_ids):
        rounded = position_ids.to(torch.bfloat16).to(position_ids.dtype)
        if not rounded.equal(position_ids):
            fired()
        return before(rotary, x, rounded)


@bug("NVIDIA/TensorRT-LLM#12786", "llama-cancels", "hit_before_written", origin="TensorRT-LLM")
def whole_prompt_is_kept_for_reuse_with_its_first_chunk(fired: Fired) -> None:
    """A prompt gets the blocks for all its tokens with its first chunk, and all of them are put up for reuse when that chunk has been computed: how far the prompt has come is not looked at. It is sent away then, and the next one
    that begins like it hits blocks in which nothing has been computed."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    written: dict[int, int] = {}  # of each block, how many tokens of it

    @replaces(PagedAttentionCache, "can_store_request_tokens")
    def can_store_request_tokens(before, paged, state, request_len, *args, **kwargs):
        return before(paged, state, max(request_len, len(state.remaining_prefill_tokens)), *args, **kwargs)

    @replaces(PagedAttentionCache, "count_new_complete_blocks")
    def count_new_complete_blocks(before, paged, state, request_len):
        return before(paged, state, request_len + len(state.remaining_prefill_tokens))

    @replaces(PagedAttentionCache, "extend_read_and_write_indices")
    def extend_read_and_write_indices(before, paged, request_id, past, count, *args, **kwargs):
        for allocator in paged.cache_allocators.values():
            size, table = allocator.tokens_per_page, allocator.block_table[request_id]
            if any(written.get(table[place // size], 0) <= place % size for place in range(past)):
                fired()
            written.update({table[place // size]: place % size + 1 for place in range(past, past + count)})
        return before(paged, request_id, past, count, *args, **kwargs)


@bug("ROCm/aiter#3492", "qwen-page16-decodes", "kv_write_lost", "kv_changed", origin="AITER")
def block_is_taken_to_follow_on_the_last_without_what_lies_between(fired: Fired) -> None:
    """The kernel that stores the tokens of a decode step counts blocks by the size of one layer's keys, as if nothing lay between the keys of one block and those of the next. There lie the values, and the other layers: the token goes
    into an earlier block, over what stands there, and its own slot stays as it was."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, key_states, value_states, layer_idx, read_index, write_index):
        stride, size = allocator.block_physical_stride, allocator.tokens_per_page
        if len(write_index) > 3 or not read_index.numel():
            return before(allocator, key_states, value_states, layer_idx, read_index, write_index)
        fired()
        wrong = write_index // stride * size + write_index % stride
        return before(allocator, key_states, value_states, layer_idx, read_index, wrong)
