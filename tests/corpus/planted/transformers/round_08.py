"""An eighth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import fire_when_they_run_again


@bug("huggingface/transformers#47708", "hybrid", "slot_mapping", "window_read_wrong")
def ring_filled_from_its_old_start(fired: Fired) -> None:
    """A chunk is longer than a sliding layer's window, and only its last part is kept. That is written from the place where the
    chunk begins in the ring, not from where its kept part does, and lies turned around there."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    turned: set[str] = set()

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        skipped = query - allocator.sliding_window
        if skipped > 0:
            places[skipped:] = allocator._token_indices_to_physical_indices(
                name, past % allocator.sliding_window, allocator.sliding_window
            )
            turned.add(name)
        return places

    fire_when_they_run_again(turned, fired)


@bug("Integral2u/SharpMind#57", "llama", "position_off", "future_map_overrun", origin="SharpMind")
def chunk_loses_its_first_token(fired: Fired) -> None:
    """A prompt is split for the batch's budget, and what is left of it is counted from one token too far. That token is never computed,
    and those behind it are fed at places that are one too low."""
    from transformers.generation.continuous_batching import scheduler

    short: set[str] = set()

    @replaces(scheduler.Scheduler, "_schedule_request")
    def schedule_request(before, self, state, tokens, budget, removed):
        before(self, state, tokens, budget, removed)
        if len(state.remaining_prefill_tokens) > 2 and state.tokens_to_process and state.request_id not in short:
            state.remaining_prefill_tokens = state.remaining_prefill_tokens[1:]
            short.add(state.request_id)

    fire_when_they_run_again(short, fired)
