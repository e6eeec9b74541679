"""A thirty-third round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


@bug("radixark/miles#2783", "hybrid-page4-weights", "cache_kept_over_new_weights", origin="miles")
def weights_are_changed_in_place_without_a_flush(fired: Fired) -> None:
    """Rollouts are paused for an update that changes the weights in place, and this way of pausing asks for no flush. The tree still has what the weights before have computed, in the layers with a window and in the others, and
    prompts that come behind the update go on from it."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    old: set[int] = set()
    written: set[int] = set()

    @replaces(SchedulerWeightUpdaterManager, "flush_cache_after_weight_update")
    def flush_cache_after_weight_update(before, updater, received, success, message):
        old.update(written)
        received.flush_cache = False
        return before(updater, received, success, message)

    def look(runner, batch, rows):
        if any(old.intersection(prefix) for *_, prefix in rows):
            fired()
        written.update(batch.out_cache_loc.tolist())
        old.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug("paiml/aprender#2030", "llama-page2-together", "attention_seq_len_wrong", origin="aprender")
def graph_for_a_batch_size_keeps_the_reach_it_was_captured_with(fired: Fired) -> None:
    """A decode graph is kept for each batch size, and how far attention reaches is fixed in it when it is captured, by the longest sequence of that moment. It is used again while the sequences grow: attention ends where it ended
    then, and the tokens that were answered last are not read."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    reach: dict[int, int] = {}  # by batch size

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        lens = batch.seq_lens
        if not batch.forward_mode.is_decode() or len(lens) == 1:
            return before(runner, batch, *args, **kwargs)
        longest = reach.setdefault(len(lens), -(-int(lens.max()) // CHUNK) * CHUNK)
        if int(lens.max()) > longest:
            fired()
        batch.seq_lens = lens.clamp(max=longest)
        try:
            return before(runner, batch, *args, **kwargs)
        finally:
            batch.seq_lens = lens


CHUNK = 8  # tokens that attention goes through at a time


@bug("sgl-project/sglang#38790", "llama-host-page2", "stored_wrong")
def backup_takes_rows_of_another_index_space(fired: Fired) -> None:
    """The row table names tokens in one space of indices and the buffers of a rank in another. The way that copies to the host takes the one for the other, and stores rows that belong to other tokens or to nobody; what is loaded back
    has the right place and is of others."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    wrong_on_host: set[int] = set()
    wrong: set[int] = set()  # on the device

    @replaces(MHATokenToKVPoolHost, "backup_from_device_all_layer")
    def backup_from_device_all_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        page, keys = pool.page_size, pool.k_buffer[0]
        taken = device_indices // (2 * page) * page + device_indices % page
        differs = (keys[taken] != keys[device_indices]).flatten(1).any(1)
        for place, other in zip(host_indices.tolist(), differs.tolist(), strict=True):
            (wrong_on_host.add if other else wrong_on_host.discard)(place)
        return before(host, pool, host_indices, taken, *args, **kwargs)

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        if layer_id == 0:
            for source, slot in zip(host_indices.tolist(), device_indices.tolist(), strict=True):
                (wrong.add if source in wrong_on_host else wrong.discard)(slot)
        return before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)

    def look(runner, batch, rows):
        if any(wrong.intersection(prefix) for *_, prefix in rows):
            fired()
        wrong.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug("lightseekorg/tokenspeed#864", "llama-page2-abort", "free_too_early", origin="TokenSpeed")
def abort_gives_pages_back_before_the_last_step(fired: Fired) -> None:
    """A request is sent away, and its pages are given back in that moment. It still has a step to come in which it is computed with the others: by then a prompt that waited for room has got the pages and has been stored there, and
    the request reads what is another's."""
    from sglang.srt.managers.scheduler import Scheduler

    lost: set[int] = set()

    @replaces(Scheduler, "abort_request")
    def abort_request(before, scheduler, received):
        before(scheduler, received)
        for req in scheduler.running_batch.reqs:
            if req.rid.startswith(received.rid) and not req.finished():
                tree, kv = scheduler.tree_cache, req.kv
                begin, end = kv.cache_protected_len, req.owned_kv_len() // tree.page_size * tree.page_size
                lost.update(scheduler.req_to_token_pool.req_to_token[kv.req_pool_idx, begin:end].tolist())
                tree.free_kv_row(kv, [(begin, end)])
                kv.cache_protected_len = end  # they are not given back again
                req.skip_radix_cache_insert = True
                scheduler.running_batch.batch_is_full = False

    once_written_again(fired, lost)
