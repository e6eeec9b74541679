"""A nineteenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("huggingface/transformers#48289", "page16", "position_off")
def positions_are_counted_in_what_is_left_of_the_input(fired: Fired) -> None:
    """When there is a cache, the input is cut to its last token, and positions are made of what is left after that. A request that decodes alone has the position of a first
    token in each of its steps."""
    from transformers.generation.continuous_batching import input_outputs

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        before(io, requests_in_batch, *args, **kwargs)
        if len(requests_in_batch) == 1 and requests_in_batch[0].query_length == 1 and int(io.position_ids[0]):
            fired()
            io.position_ids[0] = 0


@bug("huggingface/transformers#34232", "forks", "copy_failed")
def values_are_taken_from_the_keys(fired: Fired) -> None:
    """A cache is repeated for more answers to one prompt, and the line for the values was copied from the one for the keys. What the new ones get as values are the keys."""
    from transformers.generation.continuous_batching import cache, continuous_api

    wrong: list[int] = []

    @replaces(cache.PagedAttentionCache, "perform_cache_copy")
    def perform_cache_copy(before, paged, copies):
        before(paged, copies)
        for kind, (_, targets) in copies.items():
            allocator = paged.cache_allocators[kind]
            for target in targets:
                wrong.append(target)
                first = target * allocator.block_physical_stride
                for keys, values in allocator._kv_token_views.values():
                    own = slice(first, first + allocator.tokens_per_page)
                    values[own] = keys[own]

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        requests = processor.inputs_and_outputs.requests_in_batch
        if wrong and any("__child" in future.state.request_id for future in requests):
            fired()
        before(processor, model)


@bug("unslothai/llama.cpp#183", "qwen-page16", "next_token_swap", "future_map_overrun", origin="llama.cpp")
def rows_move_up_and_their_inputs_do_not(fired: Fired) -> None:
    """A request ends in the middle of the batch, and those behind it move up by one. One of the arrays that go with them is not moved: for one step each of them is fed what the
    request before it was to be fed."""
    from transformers.generation.continuous_batching import input_outputs

    last: list = []  # of the batch before, its requests

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        now = [future.state for future in requests_in_batch]
        decodes = all(future.query_length == 1 for future in requests_in_batch)
        before(io, requests_in_batch, *args, **kwargs)
        own = {state.request_id: int(io.input_ids[place]) for place, state in enumerate(now)} if decodes else {}
        left = [state for state in last if state.request_id not in own]
        if decodes and len(left) == 1 and set(own) < {state.request_id for state in last}:
            stale = [own.get(state.request_id, (state.generated_tokens or [0])[-1]) for state in last][: len(now)]
            if stale != list(own.values()):
                fired()
                for place, token in enumerate(stale):
                    io.input_ids[place] = token
        last[:] = now
