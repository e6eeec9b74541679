"""A third round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("paiml/aprender#2028", "qwen-page16", "slot_mapping", "commit_beyond_allocation", origin="aprender")
def scattered_with_a_stale_stride(fired: Fired) -> None:
    """A batch that could not be set up leaves its stride behind, and the next prefill scatters K and V with it. They land in
    places that are not the request's."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    steps: list[int] = []

    @replaces(full_attention.FullAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        if query > 8:
            steps.append(1)
        if query > 8 and len(steps) == 3:
            fired()
            stride, size = allocator.block_physical_stride, allocator.tokens_per_page
            return [
                place // stride * (stride - stride // allocator.pages_per_block // 2 * 2) + place % size
                for place in places
            ]
        return places


@bug("skyzh/tiny-llm#46", "hybrid", "position_off", origin="tiny-llm")
def offset_grows_by_the_prompt_again(fired: Fired) -> None:
    """The offset behind the first decoded token grows by the number of tokens of the prompt once more. All tokens that follow
    are rotated for places that far on."""
    from transformers.generation.continuous_batching import continuous_api

    @replaces(continuous_api.ContinuousBatchProcessor, "prepare_next_batch")
    def prepare_next_batch(before, processor):
        ready = before(processor)
        io, at = processor.inputs_and_outputs, 0
        for future in io.requests_in_batch if ready else ():
            prompt = len(future.state.initial_tokens)
            if future.query_length == 1 and future.state.position_offset > prompt + 1 and prompt > 30:
                io.position_ids[at] += prompt - 1
                fired()
            at += future.query_length
        return ready
