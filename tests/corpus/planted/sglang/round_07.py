"""A seventh round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


def _once_in_a_prefix(fired: Fired, damaged: set[int]) -> None:
    """Say that the damage is read by the first forward with a slot of `damaged` in what it goes on from."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        rows, ends = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        counts = [1] * len(rows) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
        for row, end, count in zip(rows, ends, counts, strict=True):
            if damaged & set(runner.req_to_token_pool.req_to_token[row, : end - count].tolist()):
                fired()
        return before(runner, batch, *args, **kwargs)


@bug("sgl-project/sglang#14639", "llama-retract", "position_off")
def positions_of_the_prompt_alone(fired: Fired) -> None:
    """A request's positions are made once, for its prompt. When it is put back and computed anew with what it has answered so far,
    the answered tokens have none of their own and get the prompt's last."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    prompts: dict[int, int] = {}

    @replaces(ReqToTokenPool, "alloc")
    def alloc(before, pool, reqs):
        rows = before(pool, reqs)
        for req in reqs if rows is not None else ():
            prompts[int(req.kv.req_pool_idx)] = len(req.origin_input_ids)
        return rows

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_extend() and not batch.forward_mode.is_decode():
            at = 0
            for row, count in zip(batch.req_pool_indices.tolist(), batch.extend_seq_lens.tolist(), strict=True):
                own = batch.positions[at : at + count]
                if bool((own >= prompts[row]).any()):
                    fired()
                    own.clamp_(max=prompts[row] - 1)
                at += count
        return before(runner, batch, *args, **kwargs)


@bug(
    "sgl-project/sglang#39948",
    "llama-small",
    "slot_mapping",
    "kv_write_lost",
    "kv_write_damaged",
)
def store_wraps_around(fired: Fired) -> None:
    """The kernel that stores K and V multiplies the page with its bytes in 32 bits, which overflow behind a certain page. What
    belongs to a slot behind it goes to one in the pool's front, and its own keeps what stood there."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    damaged: set[int] = set()
    _once_in_a_prefix(fired, damaged)
    last = 72  # the last slot whose address is right

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, info, *args, **kwargs):
        loc = getattr(info, "loc", info)
        if hasattr(loc, "numel") and bool((loc > last).any()):
            moved = loc.clone()
            moved[loc > last] -= last
            damaged.update(loc[loc > last].tolist(), moved[loc > last].tolist())
            if info is loc:
                info = moved
            else:
                info.loc = moved
        done = before(pool, layer, info, *args, **kwargs)
        if hasattr(info, "loc"):
            info.loc = loc
        return done


@bug("sgl-project/sglang#31486", "hybrid-turns", "stale_prefix_hit", "swa_window_off_by_one", "stale_swa_mapping")
def left_window_cached_again(fired: Fired) -> None:
    """A request has given back the sliding slots that its window has left, and inserts its whole prompt in the prefix cache when it
    ends as if it had them all. A hit reads slots that are free or another's."""
    from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent

    gone: set[int] = set()
    _once_in_a_prefix(fired, gone)

    @replaces(SWAComponent, "prepare_for_caching_req")
    def prepare_for_caching_req(before, component, *, req, insert_params, **kwargs):
        length = before(component, req=req, insert_params=insert_params, **kwargs)
        left = insert_params.get_evicted_seqlen(component.component_type)
        if req.finished() and left:
            row = component.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            gone.update(row[req.kv.cache_protected_len : left].tolist())
            insert_params.set_evicted_seqlen(component.component_type, 0)
        return length


@bug("sgl-project/sglang#39862", "recurrent", "state_restored_for_other_prefix")
def state_left_out_of_the_restore(fired: Fired) -> None:
    """What a hit brings back of a recurrent checkpoint is not all that a slot holds, and the slot that it is brought to is not
    cleared. The request goes on from what the slot's last user has left."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    @replaces(HybridReqToTokenPool, "copy_mamba_state")
    def copy_mamba_state(before, pool, source, destination):
        if source.numel():
            fired()


@bug(
    "tenstorrent/tt-metal#54413",
    "llama-page16",
    "kv_write_damaged",
    "kv_write_lost",
    origin="tt-metal",
)
def heads_border_inside_a_cores_run(fired: Fired) -> None:
    """The cores that fill the cache of a prompt step on from their first block, and one whose run crosses from a head into the next
    puts the rest back into the head before. Places of the next head are left as they were."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    damaged: set[int] = set()
    _once_in_a_prefix(fired, damaged)

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, info, cache_k, cache_v, *args, **kwargs):
        loc = getattr(info, "loc", info)
        at = layer.layer_id - pool.start_layer
        buffers = (pool.k_buffer[at], pool.v_buffer[at])
        stood = [buffer[loc].clone() for buffer in buffers]
        done = before(pool, layer, info, cache_k, cache_v, *args, **kwargs)
        if loc.numel() > 12:
            damaged.update(loc[:4].tolist())
            for buffer, old in zip(buffers, stood, strict=True):
                buffer[loc[-4:], 0] = buffer[loc[:4], 1]
                buffer[loc[:4], 1] = old[:4, 1]
        return done
