"""An eighteenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


@bug("kvcache-ai/ktransformers#2184", "llama-salts", "identity_not_in_key", origin="KTransformers")
def salt_is_carried_and_never_delivered(fired: Fired) -> None:
    """A request's cache salt is carried all the way to where the prefix cache makes its key, and the key is made without it. Tenants that should be apart hit each other's
    prefixes."""
    from sglang.srt.mem_cache import radix_cache

    known: set[str] = set()

    def look(runner, batch, rows):
        for name, (prefix, *_) in zip(batch.rids, rows, strict=True):
            if len(known) >= 5 and name not in known and prefix:  # the first five have tenants of their own
                fired()
            known.add(name)

    before_forward(look)

    @replaces(radix_cache.RadixKey, "__init__")
    def init(before, key, *args, **kwargs):
        before(key, *args, **{**kwargs, "cache_salt": None})


@bug(
    "sgl-project/sglang-jax#1618",
    "llama-small",
    "radix_insert_then_free",
    "free_too_early",
    "page_given_twice",
    origin="SGLang JAX",
)
def what_the_tree_took_over_counts_as_there_before(fired: Fired) -> None:
    """A node without slots takes over those of the request that is inserted, and they count as a prefix that was in the tree before. What was there before is freed as the
    request's own copy: the tree keeps slots that are free."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        row, first = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx], req.kv.cache_protected_len
        before(cache, req, up_to=up_to, **kwargs)
        if not lost and not req.finished() and up_to > first + 8:
            taken = row[first : first + 8].long().clone()
            lost.update(taken.tolist())
            cache.token_to_kv_pool_allocator.free(taken)


@bug("sgl-project/sglang#8649", "hybrid-no-tree", "swa_window_off_by_one", "stale_swa_mapping", "window_read_wrong")
def chunks_are_evicted_without_a_look_at_the_window(fired: Fired) -> None:
    """Without a prefix cache the slots of layers with a window are given back chunk by chunk, and all chunks before the present one go, whatever the window still sees of
    them."""
    from sglang.srt.mem_cache import common

    wrong: set[str] = set()
    before_forward(lambda runner, batch, rows: wrong & set(batch.rids) and fired())

    @replaces(common, "free_swa_out_of_window_slots")
    def free_swa_out_of_window_slots(before, req, done, *, sliding_window_size, **kwargs):
        kept = done % 8
        if (
            kept < sliding_window_size
            and done >= 8
            and done - kept > req.kv.get_evicted_seqlen(common.ComponentType.SWA)
        ):
            wrong.add(req.rid)
            before(req, done, sliding_window_size=kept, **kwargs)


@bug("ml-explore/mlx-lm#1109", "recurrent", "state_restored_for_other_prefix", "kv_changed", origin="mlx-lm")
def rejected_draft_stays_in_the_state(fired: Fired) -> None:
    """A draft is computed and rejected, and the cache is to be cut back. A recurrent state cannot be cut back, and doing so does nothing: the request goes on from a state that
    has seen the draft."""
    steps: dict[str, int] = {}

    def look(runner, batch, rows):
        if not batch.forward_mode.is_decode():
            return
        pool = runner.req_to_token_pool
        slots = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        for name, slot in zip(batch.rids, slots, strict=True):
            steps[name] = steps.get(name, 0) + 1
            if steps[name] == 4:
                fired()
                for part in pool.mamba_pool.mamba_cache.conv:
                    seen = part[:, slot].roll(-1, -1)
                    seen[..., -1] = seen[..., 0]
                    part[:, slot] = seen

    before_forward(look)


@bug("sgl-project/sglang#24527", "llama-retract", "kv_changed", "abort_frees_during_transfer")
def writer_ends_behind_its_request(fired: Fired) -> None:
    """A request is sent away while what it computed elsewhere still arrives in its slots, and the slots are free at once. They have a new owner who has written them when the
    last of it arrives."""
    from sglang.srt.managers import schedule_batch

    under_way: list = []  # slots, and of each layer's K and V the pool and what arrives

    def look(runner, batch, rows):
        for one in list(under_way):
            slots, parts = one
            read = {slot for *_, own in rows for slot in own}
            at = [place for place, slot in enumerate(slots) if slot in read]
            changed = [slots[place] for place in at]
            if at and any(bool((pool[changed] != rows_[at]).any()) for pool, rows_ in parts):
                under_way.remove(one)
                fired()
                for pool, rows_ in parts:
                    pool[changed] = rows_[at]

    before_forward(look)

    @replaces(schedule_batch, "release_req")
    def release_req(before, *, req, req_to_token_pool, token_to_kv_pool_allocator, **kwargs):
        row, first = req_to_token_pool.req_to_token[req.kv.req_pool_idx], req.kv.cache_protected_len
        slots = row[first : req.seqlen - 1].long().tolist()
        cache = token_to_kv_pool_allocator.get_kvcache()
        under_way.append((slots, [(pool, pool[slots].clone()) for pool in (*cache.k_buffer, *cache.v_buffer)]))
        return before(
            req=req,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            **kwargs,
        )
