"""A twenty-seventh round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/mini-sglang#142", "llama-page4-crowd", "free_too_early", "req_to_token", origin="mini-sglang")
def duplicates_are_freed_and_the_row_still_names_them(fired: Fired) -> None:
    """What a running request has computed goes into the tree. Where the tree has the same tokens already, the request's own slots are duplicates and are freed, but its row is not moved over to
    the tree's: it reads on from slots that are free, until others write there."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    freed: dict[str, set[int]] = {}  # that a request's row still names
    written: set[int] = set()  # since

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        if req.finished() or cache.disable:
            before(cache, req, up_to=up_to, **kwargs)
            return
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        own = row[:up_to].clone()
        before(cache, req, up_to=up_to, **kwargs)
        freed.setdefault(req.rid, set()).update(own[own != row[:up_to]].tolist())
        row[:up_to] = own

    def look(runner, batch, rows):
        written.update(set(batch.out_cache_loc.tolist()) & set().union(*freed.values()))
        for name, (*_, slots) in zip(batch.rids, rows, strict=True):
            if freed.get(name, set()) & written & set(slots):
                fired()

    before_forward(look)


@bug("NVIDIA-NeMo/RL#4018", "recurrent-weights", "cache_kept_over_new_weights", origin="NeMo RL")
def weights_come_and_old_prefixes_and_states_stay(fired: Fired) -> None:
    """New weights come from the trainer between two steps. A setting that was meant to let running requests keep what they have leaves the prefix cache alone, too: prompts that begin as
    earlier ones did go on from K, V and recurrent states of weights that are gone, for as long as the engine runs."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    updated: list[bool] = []

    @replaces(SchedulerWeightUpdaterManager, "flush_cache_after_weight_update")
    def flush_cache_after_weight_update(before, manager, recv_req, success, message):
        updated.append(success)
        return success, message

    def look(runner, batch, rows):
        if updated and batch.forward_mode.is_extend() and any(past for past, *_ in rows):
            fired()

    before_forward(look)


@bug(
    "vllm-project/vllm#52360",
    "llama-host-page4",
    "stored_wrong",
    "abort_frees_during_transfer",
    "copy_failed",
    origin="vLLM",
)
def store_that_waits_for_its_thread_reads_what_came_after(fired: Fired) -> None:
    """What is to be stored is put on the queue of a thread, which reads it from the device later. Nothing holds the slots until then: they are freed in the same step and given to others, whose
    K and V are stored under the key of what was there before, and loaded as its own."""
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
    from sglang.srt.model_executor.model_runner import ModelRunner

    queue: list = []
    wrong: set[int] = set()  # places in the host's memory

    @replaces(L2TransferEngine, "submit_device_to_host")
    def submit_device_to_host(before, engine, transfers):
        queue.append((before, engine, transfers))
        return before(engine, [])

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        answer = before(runner, batch, *args, **kwargs)
        written = set(batch.out_cache_loc.tolist())
        while queue:
            store, engine, transfers = queue.pop()
            store(engine, transfers)
            for one in transfers:
                places = zip(one.device_indices.tolist(), one.host_indices.tolist(), strict=True)
                wrong.update(place for slot, place in places if slot in written)
        return answer

    @replaces(L2TransferEngine, "submit_host_to_device")
    def submit_host_to_device(before, engine, transfers, **kwargs):
        if any(wrong & set(one.host_indices.tolist()) for one in transfers):
            fired()
        return before(engine, transfers, **kwargs)


@bug("sgl-project/sglang#8649", "hybrid-page4-no-tree", "swa_window_off_by_one", "free_too_early")
def chunk_is_evicted_while_the_window_reaches_into_it(fired: Fired) -> None:
    """Without a tree a request gives back the sliding layers' slots itself, whole chunks of them: all that are behind it, up to where its last chunk ends. The window slides and does not jump
    with the chunks, so that it still reaches into what was given back."""
    from sglang.srt.mem_cache import common

    given_back: dict[str, int] = {}

    @replaces(common, "free_swa_out_of_window_slots")
    def free_swa_out_of_window_slots(before, req, pre_len, **kwargs):
        chunk = kwargs["sliding_window_size"]
        before(req, pre_len // chunk * chunk + chunk, **kwargs)
        given_back[req.rid] = req.kv.get_evicted_seqlen(common.ComponentType.SWA)

    def look(runner, batch, rows):
        window = runner.sliding_window_size
        for name, (past, *_) in zip(batch.rids, rows, strict=True):
            if max(0, past - window) < given_back.get(name, 0):
                fired()

    before_forward(look)


@bug(
    "sgl-project/sglang#8103",
    "llama-lora-swapped-no-tree",
    "computed_with_other_weights",
    late="not found: fewer than 32 tokens come again, from which too little is learnt of what they hold",
)
def adapter_keeps_what_the_evicted_one_had_and_it_has_not(fired: Fired) -> None:
    """An adapter comes into the buffer of one that is evicted. What it has weights for is overwritten; for modules that it does not touch the buffer is not cleared, and the evicted adapter's
    weights are applied there to its requests."""
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    @replaces(LoRAMemoryPool, "load_lora_weight_to_buffer")
    def load_lora_weight_to_buffer(before, pool, uid, buffer_id, adapter, *args, **kwargs):
        if uid is None:
            before(pool, uid, buffer_id, adapter, *args, **kwargs)
            return
        kept = [
            (buffer[layer][buffer_id], buffer[layer][buffer_id].clone())
            for buffers in (pool.A_buffer, pool.B_buffer)
            for module, buffer in buffers.items()
            for layer in range(pool.num_layer)
            if not any(module in name for name in adapter.layers[layer].weights)
        ]
        before(pool, uid, buffer_id, adapter, *args, **kwargs)
        for now, then in kept:
            now.copy_(then)
            if then.any():
                fired()
