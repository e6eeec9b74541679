"""An eighteenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("tenstorrent/tt-metal#55742", "llama", "kv_write_lost", "kv_write_damaged", origin="tt-metal")
def last_of_an_odd_batch_is_left_out(fired: Fired) -> None:
    """The rows of a decode are written two by two, and how many pairs there are is rounded down. In a batch of an odd number the last row's K and V are not written, and its
    next step reads what was there before."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    last: list[int] = []  # row of the batch
    damaged: set[str] = set()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        last.clear()
        if damaged & {future.state.request_id for future in requests_in_batch}:
            fired()
        count = len(requests_in_batch)
        if count >= 3 and count % 2 and all(future.query_length == 1 for future in requests_in_batch):
            last.append(count - 1)
            damaged.add(requests_in_batch[-1].state.request_id)
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        held = [(view, view[write_index[last]].clone()) for view in allocator._kv_token_views[layer]]
        made = before(allocator, keys, values, layer, read_index, write_index)
        for view, rows in held:
            view[write_index[last]] = rows
        return made


@bug("Avarok-Cybersecurity/atlas#373", "few", "free_too_early", "page_given_twice", "double_free", origin="Atlas")
def count_of_a_shared_block_is_set_to_nothing(fired: Fired) -> None:
    """What gives a block back does not take one from its count of owners, it sets the count to nothing. A block that others still read goes back to the pool, and is given to
    somebody who writes it."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator, cache_pool

    lost: set[int] = set()
    again: set[int] = set()

    @replaces(cache_allocator.BlockLedger, "release")
    def release(before, ledger, block, *args, **kwargs):
        if ledger.shared_ref_counts.pop(block, 0):
            lost.add(block)
        return before(ledger, block, *args, **kwargs)

    @replaces(cache_pool.CachePool, "get_free_blocks")
    def get_free_blocks(before, pool, *args, **kwargs):
        given = before(pool, *args, **kwargs)
        again.update(lost & set(given))
        return given

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        for allocator in io.cache.cache_allocators.values():
            for block in again:
                owners = {name for name, table in allocator.block_table.items() if block in table}
                if len(owners) > 1 and owners & {future.state.request_id for future in requests_in_batch}:
                    fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("vllm-project/vllm#46278", "offload", "stored_wrong", origin="vLLM")
def copy_to_the_host_does_not_wait_for_the_step(fired: Fired) -> None:
    """A block is copied to the host as soon as its tokens are counted, and nothing makes the copy wait for the step that writes them. What comes back later has what was in the
    slots before that step."""
    from transformers.generation.continuous_batching import input_outputs, offloading_manager

    was: dict[str, object] = {}  # of each allocator, its blocks before the last step
    wrong: set[str] = set()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, *args, **kwargs):
        was.update({kind: one._copy_view.clone() for kind, one in io.cache.cache_allocators.items()})
        before(io, *args, **kwargs)

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        held = []
        for name, groups in tables.items():
            for kind, blocks in groups.items():
                view = manager.cache.cache_allocators[kind]._copy_view
                if kind in was and bool((view[blocks] != was[kind][blocks]).any()):
                    wrong.add(name)
                    held.append((view, blocks, view[blocks].clone()))
                    view[blocks] = was[kind][blocks]
        done = before(manager, victims, tables)
        for view, blocks, rows in held:
            view[blocks] = rows
        return done

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(future.state.is_cpu_offloaded and future.state.request_id in wrong for future in batch):
            fired()
        before(manager, batch)


@bug("Blaizzy/mlx-vlm#1155", "qwen-page16", "position_off", origin="mlx-vlm")
def all_rows_are_moved_on_by_the_best(fired: Fired) -> None:
    """After a round of drafts all rows of the batch are moved on by as many as the best of them took, and nobody moves the others back. Their next tokens are rotated for places
    that they have not reached, farther from round to round."""
    from transformers.generation.continuous_batching import input_outputs

    ahead: dict[str, int] = {}
    rounds: list[int] = []

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        before(io, requests_in_batch, *args, **kwargs)
        decodes = [future for future in requests_in_batch if future.query_length == 1]
        if len(decodes) > 1:
            rounds.append(0)
            for future in decodes[1:] if len(rounds) % 5 == 0 else ():
                ahead[future.state.request_id] = ahead.get(future.state.request_id, 0) + 2
        at = 0
        for future in requests_in_batch:
            gap = ahead.get(future.state.request_id, 0)
            if gap and future.query_length == 1:
                fired()
                io.position_ids[at] += gap
            at += future.query_length
