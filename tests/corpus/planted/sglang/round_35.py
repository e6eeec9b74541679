"""A thirty-fifth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


@bug("sgl-project/sglang#27472", "llama-page2-overrides", "identity_not_in_key")
def prompt_with_embeddings_of_its_own_is_kept_under_its_tokens(fired: Fired) -> None:
    """A caller may put embeddings in the place of some of a prompt's tokens. Such a prompt asks the tree for nothing, and is put into it all the same when it has been computed, under the tokens that it was given: one with the same tokens and
    without these embeddings hits what was made of them."""
    from sglang.srt.managers.schedule_batch import Req

    own: set[str] = set()
    made: set[int] = set()

    @replaces(Req, "__init__")
    def init(before, req, *args, **kwargs):
        before(req, *args, **kwargs)
        if req.positional_embed_overrides is not None:
            own.add(req.rid)
            req.skip_radix_cache_insert = False

    def look(runner, batch, rows):
        counts = [end - past for past, end, _ in rows]
        for rid, (*_, prefix), slots in zip(batch.rids, rows, batch.out_cache_loc.split(counts), strict=True):
            if rid not in own and made.intersection(prefix):
                fired()
            (made.update if rid in own else made.difference_update)(slots.tolist())

    before_forward(look)


@bug("sgl-project/sglang#30578", "llama-page4-rows", "kv_changed", "shared_page_written")
def runner_writes_back_through_a_row_that_is_anothers(fired: Fired) -> None:
    """The runner keeps what requests have answered to itself, and writes it into the pool when a prompt with a prefix is to be read from there. It looks the places up in the row that a request had, also when the request has ended
    and the row is another's: K and V of the old answer go over the prefix that is about to be read."""
    from sglang.srt.managers.scheduler_components import batch_result_processor

    kept: dict[int, tuple] = {}  # of a row, where its last request's answer begins, and its K and V in each layer
    pools: list = []

    @replaces(batch_result_processor, "release_kv_cache")
    def release_kv_cache(before, req, tree, **kwargs):
        if req.kv.holds_kv and pools:
            first, row = len(req.origin_input_ids), req.kv.req_pool_idx
            slots = tree.req_to_token_pool.req_to_token[row, first : req.kv.kv_committed_len].long()
            halves = [*pools[0].k_buffer, *pools[0].v_buffer]
            kept[row] = first, [half[slots].clone() for half in halves]
        return before(req, tree, **kwargs)

    def look(runner, batch, rows):
        pool = runner.token_to_kv_pool
        pools[:] = [pool]
        if not batch.forward_mode.is_extend():
            return
        for row, (past, *_) in zip(batch.req_pool_indices.tolist(), rows, strict=True):
            first, answer = kept.pop(row, (0, []))
            if not answer or past <= first:
                continue
            slots = runner.req_to_token_pool.req_to_token[row, first:past].long()[: len(answer[0])]
            for half, old in zip([*pool.k_buffer, *pool.v_buffer], answer, strict=True):
                half[slots] = old[: len(slots)]
            fired()

    before_forward(look)


@bug("bytedance-iaas/sglang#638", "llama-host-page8-pinned", "host_copy_overwritten", origin="SGLang")
def host_pages_are_free_while_they_are_loaded(fired: Fired) -> None:
    """What comes back from the host is ordered and copied later, and only the slots on the device are held until then. The pages of the host count as free: what another node has to leave there is stored in them first, and comes back in their
    place."""
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    ordered: list = []
    copies: list = []  # that are made when the batch has been put together
    right: dict[int, torch.Tensor] = {}  # of each slot of the host that is ordered, its first layer's keys
    wrong: list[bool] = []

    @replaces(HybridCacheController, "load")
    def load(before, controller, host_indices, *args, **kwargs):
        given = before(controller, host_indices, *args, **kwargs)
        if given is not None and len(host_indices):
            ordered.append(host_indices.clone())
            keys = controller.mem_pool_host.anchor_entry.host_pool.k_data_refs[0]
            right.update({int(slot): keys[slot].clone() for slot in host_indices})
        return given

    @replaces(HybridCacheController, "write")
    def write(before, controller, device_indices, *args, **kwargs):
        pool = controller.mem_pool_host.anchor_entry.host_pool
        if ordered:
            again = torch.cat(ordered)
            pool.slot_used[again] = False
            pool.free_slots = torch.cat([again, pool.free_slots])
            ordered.clear()
        return before(controller, device_indices, *args, **kwargs)

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        def copy():
            keys = host.k_data_refs[0]
            wrong.extend(not keys[slot].equal(right[slot]) for slot in host_indices.tolist() if slot in right)
            before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)

        copies.append(copy)

    @replaces(Scheduler, "get_next_batch_to_run")
    def get_next_batch_to_run(before, scheduler, *args, **kwargs):
        plan = before(scheduler, *args, **kwargs)
        for copy in copies:
            copy()
        copies.clear()
        return plan

    def look(runner, batch, rows):
        ordered.clear()
        right.clear()
        if any(wrong):
            fired()

    before_forward(look)


@bug("sgl-project/sglang-jax#982", "llama-overlap-page1-ends", "double_free", "page_given_twice", origin="SGLang JAX")
def last_slot_is_given_back_by_who_counts_and_by_who_decodes(fired: Fired) -> None:
    """How much of a request is to be given back is worked out from its tokens when it ends, and takes in the slot of its last step. Where results are handled beside the next step, that slot is given back by hand as well: two requests get
    it one after the other, and both go on."""
    from sglang.srt.managers.scheduler import Scheduler

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(Scheduler, "process_batch_result")
    def process_batch_result(before, scheduler, batch, *args, **kwargs):
        ends = {}
        for req in batch.reqs:
            if batch.forward_mode.is_decode() and req.kv.holds_kv and not req.finished():
                row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                ends[req.rid] = row[req.kv.kv_committed_len - 1].clone()
        result = before(scheduler, batch, *args, **kwargs)
        for req in batch.reqs:
            if req.finished() and req.rid in ends and int(ends[req.rid]):
                lost.add(int(ends[req.rid]))
                scheduler.token_to_kv_pool_allocator.free(ends[req.rid][None].long())
        return result


@bug("NVIDIA/TensorRT-LLM#13278", "recurrent-parked", "state_restored_for_other_prefix", origin="TensorRT-LLM")
def rows_behind_a_smaller_batch_still_name_states(fired: Fired) -> None:
    """States are put back through a list that has a place for each row of the largest batch, and of which a smaller batch fills the front. The rows behind it name who stood there before: requests that wait while a prompt is computed, whose
    states are overwritten by what the padding came to."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    listed: list[int] = []  # slots of the states, by row
    spoilt: set[int] = set()

    def slots_of(runner, batch):
        return runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        own = slots_of(runner, batch)
        if spoilt.intersection(own):
            fired()
        result = before(runner, batch, *args, **kwargs)
        spoilt.difference_update(own)
        behind = [slot for slot in listed[len(own) :] if slot not in own]
        listed[: len(own)] = own
        cache = runner.req_to_token_pool.mamba_pool.mamba_cache
        for part in [*cache.conv, *([] if cache.temporal is None else [cache.temporal])]:
            for slot in behind:
                part[:, slot] = part[:, own[-1]]
        spoilt.update(behind)
        return result
