"""A twenty-sixth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("Blaizzy/mlx-vlm#1143", "llama", "position_off", origin="mlx-vlm")
def what_the_newest_prompt_adds_to_its_places_is_added_to_all(fired: Fired) -> None:
    """How far a prompt's last place is from the number of tokens that were given for it is kept on the model, for the decodes that follow. All that decode read it there and not with
    their own request: when a prompt comes that has hit a prefix, they all are moved on by as much."""
    from transformers.generation.continuous_batching import input_outputs

    kept = [0]
    begins: dict[str, int] = {}

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        pasts = [future.state.position_offset for future in requests_in_batch]
        before(io, requests_in_batch, *args, **kwargs)
        at, newest = 0, kept[0]
        for future, past in zip(requests_in_batch, pasts, strict=True):
            name = future.state.request_id
            if future.query_length > 1 or name not in begins:
                newest = begins.setdefault(name, past)
            elif kept[0]:
                fired()
                io.position_ids[at] += kept[0]
            at += future.query_length
        kept[0] = newest


@bug(
    "nicedreamzapp/claude-code-local#46",
    "llama",
    "position_off",
    "tokens_truncated_hash_kept",
    origin="claude-code-local",
)
def cut_back_by_the_size_of_what_it_grows_by(fired: Fired) -> None:
    """A conversation's cache is taken over by the next one and is to be cut back to what both have in common. How much that is comes from the size of the pieces that the cache grows by and
    not from its length, is less than nothing, and nothing is cut: the rest of the new prompt is put behind all of the old one."""
    from transformers.generation.continuous_batching import cache, input_outputs, scheduler

    longer: dict[str, int] = {}  # by how many tokens of somebody else a request is longer than it should be

    @replaces(scheduler.Scheduler, "_infer_request_tokens")
    def _infer_request_tokens(before, plan, state, removed):
        name, begun = state.request_id, state.position_offset
        tokens = before(plan, state, removed)
        (allocator,) = plan.cache.cache_allocators.values()
        hit, known = state.position_offset - begun, allocator.ledger
        if not hit or longer:
            return tokens
        mine = allocator.block_table[name]
        for other, blocks in list(allocator.block_table.items()):
            rest = [block for block in blocks[len(mine) :] if block in known.block_to_hash]
            if other != name and blocks[: len(mine)] == mine and rest:
                for block in rest:
                    known.acquire(block)
                allocator.block_table[name] = mine + rest
                longer[name] = len(rest) * allocator.tokens_per_page
                state.position_offset += longer[name]
                break
        return tokens

    @replaces(cache.PagedAttentionCache, "mark_complete_blocks")
    def mark_complete_blocks(before, paged, state, complete):
        if state.request_id not in longer:  # what it has is not kept
            before(paged, state, complete)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in longer for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)
