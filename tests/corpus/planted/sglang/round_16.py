"""A sixteenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


@bug("jundot/omlx#2201", "llama", "slot_mapping", origin="oMLX")
def appended_behind_the_longest_that_is_left(fired: Fired) -> None:
    """Where a batch appends is worked out from the longest request that is in it. When the longest leaves, all others append as many places too early as it was longer
    than the next, over tokens that they have."""
    last: dict[int, int] = {}
    early: dict[int, int] = {}  # of a row, how many places

    def look(runner, batch, rows):
        own = batch.req_pool_indices.tolist()
        if not batch.forward_mode.is_decode():
            for row in own:
                early.pop(row, None)
            return
        left = set(last) - set(own)
        if left and set(own) <= set(last):
            gap = max(last.values()) - max(last[row] for row in own)
            for row in own:
                early[row] = early.get(row, 0) + max(0, gap)
        table = runner.req_to_token_pool.req_to_token
        slots = batch.out_cache_loc.clone()
        for place, (row, (_, end, _)) in enumerate(zip(own, rows, strict=True)):
            gap = early.get(row, 0)
            if 0 < gap < end:
                fired()
                slots[place] = table[row, end - 1 - gap]
        batch.out_cache_loc = slots
        last.clear()
        last.update({row: end for row, (_, end, _) in zip(own, rows, strict=True)})

    before_forward(look)


@bug("Blaizzy/mlx-vlm#1889", "llama-page4", "attention_seq_len_wrong", origin="mlx-vlm")
def lengths_are_not_filtered_with_the_rows(fired: Fired) -> None:
    """A request leaves the batch, and its row is taken out of the cache and not out of the lengths that attention goes by. The rows behind it have the length of the
    one before."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    last: list[tuple[int, int]] = []  # row and length

    @replaces(ModelRunner, "_forward_raw")
    def _forward_raw(before, runner, batch, *args, **kwargs):
        own, kept = batch.req_pool_indices.tolist(), batch.seq_lens
        lengths = kept.tolist()
        unfiltered = lengths
        if batch.forward_mode.is_decode() and len(last) > len(own) and set(own) <= {row for row, _ in last}:
            unfiltered = [length + 1 for _, length in last][: len(own)]
        last[:] = list(zip(own, lengths, strict=True))
        if unfiltered != lengths:
            fired()
            batch.seq_lens = kept.new_tensor(unfiltered)
        try:
            return before(runner, batch, *args, **kwargs)
        finally:
            batch.seq_lens = kept


@bug("ml-explore/mlx-lm#1736", "recurrent", "state_restored_for_other_prefix", origin="mlx-lm")
def padding_behind_a_short_chunk_goes_into_the_state(fired: Fired) -> None:
    """Chunks of one batch are padded at their ends, and the mask that says so is dropped where there is one for the beginnings. Attention does not look behind a
    request's end; a recurrent state takes the padding in."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    damaged: set[int] = set()

    def look(runner, batch, rows):
        for row, (prefix, *_) in zip(batch.req_pool_indices.tolist(), rows, strict=True):
            if row in damaged and prefix:
                fired()

    before_forward(look)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        own = batch.req_pool_indices.tolist()
        counts = [] if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
        slots = runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        done = before(runner, batch, *args, **kwargs)
        for row, slot, count in zip(own, slots, counts, strict=False):
            if count < max(counts):
                damaged.add(row)
                for part in runner.req_to_token_pool.mamba_pool.mamba_cache.conv:
                    state = part[:, slot].roll(-1, -1)
                    state[..., -1] *= 0.5
                    part[:, slot] = state
        return done


@bug(
    "HYGON-AI/sglang-das#291",
    "llama-twins",
    "free_too_early",
    "radix_insert_then_free",
    "page_given_twice",
    origin="SGLang DAS",
)
def the_trees_slots_are_freed_for_the_doubles(fired: Fired) -> None:
    """Two requests have computed the same tokens, and the second finds them in the prefix cache when it is put there. What is given back as doubles are the slots of the
    prefix cache and not its own: the tree and both requests go on in slots that are free."""
    from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    known: dict[int, int] = {}  # of the slots that are put into the tree, their places
    doubles: list[int] = []

    @replaces(UnifiedRadixCache, "insert")
    def insert(before, cache, params):
        known.update({slot: place for place, slot in enumerate(params.value.tolist())})
        result = before(cache, params)
        known.clear()
        if doubles:
            tree = cache.path_device_indices(result.last_device_node).tolist()
            places = {slot: place for place, slot in enumerate(params.value.tolist())}
            wrong = [tree[places[slot]] for slot in doubles]
            doubles.clear()
            lost.update(wrong)
            cache._apply_cache_action(FreeDeviceKV([params.value.new_tensor(wrong)]))
        return result

    @replaces(UnifiedRadixCache, "_apply_cache_action")
    def _apply_cache_action(before, cache, action):
        freed = [slot for part in getattr(action, "indices", ()) for slot in part.tolist()]
        if isinstance(action, FreeDeviceKV) and freed and set(freed) <= known.keys() and not lost:
            doubles.extend(freed)
        else:
            before(cache, action)


@bug("ml-explore/mlx-lm#1746", "llama", "req_to_token", origin="mlx-lm")
def saved_with_the_filler_in_front(fired: Fired) -> None:
    """A prefill is saved to the prefix cache while the padding of its batch stands before its tokens, and the entry's length counts from the padding. Whoever hits it
    gets the slot of each token for one some places behind it."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    filler = 3
    saving: list[int] = []

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, **kwargs):
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        own = row.clone()
        saving[:] = [] if req.finished() or req.kv.cache_protected_len else [1]
        before(cache, req, **kwargs)
        if saving:
            row.copy_(own)
        saving.clear()

    @replaces(UnifiedRadixCache, "insert")
    def insert(before, cache, params):
        if saving and len(params.value) > filler:
            own = params.value.clone()
            params.value[filler:] = own[:-filler]
            params.value[:filler] = own[0]
        return before(cache, params)

    before_forward(lambda runner, batch, rows: any(len(set(prefix)) < len(prefix) for *_, prefix in rows) and fired())
