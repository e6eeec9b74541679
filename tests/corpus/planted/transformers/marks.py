"""Where a patch of transformers looks: when requests run again, and when a block is read that two have written."""

from bugs import Fired, replaces


def fire_when_they_run_again(requests: set[str], fired: Fired) -> None:
    """Mark a batch with one of the requests in it that a bug had hit before."""
    from transformers.generation.continuous_batching import continuous_api

    @replaces(continuous_api.ContinuousBatchProcessor, "prepare_next_batch")
    def prepare_next_batch(before, processor):
        old = set(requests)
        ready = before(processor)
        if ready and any(f.state.request_id in old for f in processor.inputs_and_outputs.requests_in_batch):
            fired()
        return ready


def once_written_twice(fired: Fired) -> None:
    """Say that the damage is read in the step after the one in which a block of two tables was written again."""
    from transformers.generation.continuous_batching import continuous_api

    seen: set[int] = set()

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if seen:
            fired()
        batch = {future.state.request_id: future for future in processor.inputs_and_outputs.requests_in_batch}
        for allocator in processor.cache.cache_allocators.values():
            size = allocator.tokens_per_page
            for name, future in batch.items():
                blocks = allocator.block_table.get(name, [])
                end = future.state.position_offset
                mine = set(blocks[(end - future.query_length) // size : -(-end // size)])  # written in this step
                others = [b for n, table in allocator.block_table.items() for b in table if n != name]
                seen.update(mine & ({*others} | {b for b in blocks if blocks.count(b) > 1}))
        before(processor, model)
