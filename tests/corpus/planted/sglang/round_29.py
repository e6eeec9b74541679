"""A twenty-ninth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("RLinf/RLinf#96", "llama-overlap-page4-weights", "cache_kept_over_new_weights", origin="RLinf")
def weights_are_synced_and_the_tree_stays(fired: Fired) -> None:
    """A trainer hands over new weights between two rollouts, and nothing resets the tree behind that. Prompts that begin like earlier ones are computed on from K and V of the old weights."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    old: set[int] = set()
    written: set[int] = set()

    @replaces(SchedulerWeightUpdaterManager, "flush_cache_after_weight_update")
    def flush_cache_after_weight_update(before, updater, received, success, message):
        old.update(written)
        return success, message

    def look(runner, batch, rows):
        if any(old.intersection(prefix) for *_, prefix in rows):
            fired()
        written.update(batch.out_cache_loc.tolist())
        old.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug("sgl-project/sglang#38815", "recurrent-branches", "state_restored_for_other_prefix")
def later_state_is_kept_for_the_branching_point(fired: Fired) -> None:
    """Where a prompt leaves what others have asked, the part that they have in common is kept for the next one. K and V can be cut to that length, but the recurrent state is the one at the end of the prompt: who hits the
    shorter prefix goes on from a state that has seen more."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    branches: dict[str, int] = {}
    wrong: set[tuple[int, ...]] = set()  # prefixes with a state of more than them
    asked: dict[str, list[int]] = {}

    @replaces(schedule_batch, "match_kv_cache")
    def match_kv_cache(before, req, tree, token_ids=None, **kwargs):
        result = before(req, tree, token_ids, **kwargs)
        asked[req.rid] = list(req.origin_input_ids)
        branches[req.rid] = result.full_kv_hit_length if result.full_kv_hit_length > req.prefix_len else 0
        return result

    @replaces(MambaComponent, "prepare_for_caching_req")
    def prepare_for_caching_req(before, component, req, insert_params, token_ids_len, is_finished):
        length = before(component, req, insert_params, token_ids_len, is_finished)
        branch = branches.pop(req.rid, 0)
        if is_finished or not length or not 0 < branch < length:
            return length
        wrong.add(tuple(req.origin_input_ids[:branch]))
        return branch

    def look(runner, batch, rows):
        if not batch.forward_mode.is_extend():
            return
        for rid, (past, *_) in zip(batch.rids, rows, strict=True):
            if past and tuple(asked.get(rid, [])[:past]) in wrong:
                fired()

    before_forward(look)


@bug("sgl-project/sglang#38840", "llama-page8-turns", "slot_mapping", "shared_page_written", "page_given_twice")
def decode_asks_for_slots_without_what_stands_in_front(fired: Fired) -> None:
    """A row has a part in front that its request has not computed: there an encoder's tokens, here the prefix that was hit. Decode asks for its slot by the length without that part, and puts it into the row by the whole
    length: it is given the slot behind an earlier token of the row, which is taken."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation

    front: dict[str, int] = {}

    @replaces(schedule_batch, "match_kv_cache")
    def match_kv_cache(before, req, *args, **kwargs):
        result = before(req, *args, **kwargs)
        front[req.rid] = req.prefix_len
        return result

    @replaces(allocation, "alloc_paged_token_slots_decode")
    def alloc_paged_token_slots_decode(
        before, *, seq_lens, seq_lens_cpu, req_pool_indices, batch, last_loc=None, **kwargs
    ):
        lens = seq_lens.new_tensor([front.get(req.rid, 0) for req in batch.reqs])
        last_loc = batch.req_to_token_pool.req_to_token[req_pool_indices, seq_lens - lens - 2]
        page = batch.tree_cache.page_size
        if any(n and (end - n - 1) % page for n, end in zip(lens.tolist(), seq_lens.tolist(), strict=True)):
            fired()
        return before(
            seq_lens=seq_lens - lens,
            seq_lens_cpu=seq_lens_cpu - lens.cpu(),
            last_loc=last_loc,
            req_pool_indices=req_pool_indices,
            batch=batch,
            **kwargs,
        )


@bug("sgl-project/sglang#24585", "llama-host-page8", "stored_wrong", "copy_failed")
def slots_are_given_away_before_their_copy_is_done(fired: Fired) -> None:
    """With write-back a node is copied to the host when its slots are needed. The eviction does not wait for the copy, and gives the slots away at once: the next forward writes them, and what lands on the host is of another
    request."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.model_executor.model_runner import ModelRunner

    under_way: list = []
    wrong_on_host: set[int] = set()
    wrong: set[int] = set()  # on the device

    def finish() -> None:
        while under_way:
            copy, host_indices, keys, rows = under_way.pop(0)
            changed = (keys[rows] != copy[-1]).flatten(1).any(1)
            copy[0]()
            wrong_on_host.difference_update(host_indices.tolist())
            wrong_on_host.update(host_indices[changed.to(host_indices.device)].tolist())

    @replaces(MHATokenToKVPoolHost, "backup_from_device_all_layer")
    def backup_from_device_all_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        keys, rows = pool.k_buffer[0], device_indices.clone()
        copy = (lambda: before(host, pool, host_indices, rows, *args, **kwargs), keys[rows].clone())
        under_way.append((copy, host_indices, keys, rows))

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        if layer_id == 0:
            finish()
            for source, slot in zip(host_indices.tolist(), device_indices.tolist(), strict=True):
                (wrong.add if source in wrong_on_host else wrong.discard)(slot)
        return before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)

    def look(runner, batch, rows):
        if any(wrong.intersection(prefix) for *_, prefix in rows):
            fired()
        wrong.difference_update(batch.out_cache_loc.tolist())

    @replaces(ModelRunner, "forward")
    def forward(before, *args, **kwargs):
        result = before(*args, **kwargs)
        finish()
        return result

    before_forward(look)


@bug("sgl-project/sglang#8901", "llama-host-lossy-storage", "failed_load_counted_loaded")
def page_that_is_not_there_counts_as_read(fired: Fired) -> None:
    """The storage gives nothing for a page that it has lost. The loop over the pages goes on and counts it as read, so that the prefix is taken for whole, and in its middle the host has what was in that memory before."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    lost: set[int] = set()  # on the host
    wrong: set[int] = set()  # on the device

    @replaces(HiCacheController, "_generic_page_get")
    def _generic_page_get(before, controller, operation, hash_values, host_indices, extra_info=None):
        pool, size = controller.storage_host_pool, controller.page_size
        pages = controller.storage_backend.batch_get(
            hash_values, [pool.get_dummy_flat_data_page() for _ in hash_values]
        )
        if pages is None:
            return 0
        for i, page in enumerate(pages):
            slots = host_indices[i * size : (i + 1) * size].tolist()
            (lost.update if page is None else lost.difference_update)(slots)
            if page is not None:
                pool.set_from_flat_data_page(host_indices[i * size], page)
        return len(pages)

    @replaces(MHATokenToKVPoolHost, "backup_from_device_all_layer")
    def backup_from_device_all_layer(before, host, pool, host_indices, *args, **kwargs):
        lost.difference_update(host_indices.tolist())
        return before(host, pool, host_indices, *args, **kwargs)

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        if layer_id == 0:
            for source, slot in zip(host_indices.tolist(), device_indices.tolist(), strict=True):
                (wrong.add if source in lost else wrong.discard)(slot)
        return before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)

    def look(runner, batch, rows):
        if any(wrong.intersection(prefix) for *_, prefix in rows):
            fired()
        wrong.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)
