"""A nineteenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#37505", "llama-mixed", "position_off", "draft_position_plus_one")
def prefix_of_a_decode_among_prefills_is_its_length(fired: Fired) -> None:
    """Decodes that are computed together with a prefill are turned into chunks of one token, and where such a chunk begins is counted from the request's tokens, as if the last
    step's result were not there yet. It is there, and the token is rotated for the place behind its own."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_mixed():
            at, wrong = 0, batch.positions.clone()
            for end, count in zip(batch.seq_lens.tolist(), batch.extend_seq_lens.tolist(), strict=True):
                if count == 1 and end > 1:
                    wrong[at] = end
                at += count
            if bool((wrong != batch.positions).any()):
                fired()
                batch.positions = wrong
        return before(runner, batch, *args, **kwargs)


@bug("sgl-project/sglang#25889", "hybrid", "slot_mapping", "stale_swa_mapping", "kv_write_lost")
def translation_of_the_forward_before_is_used_again(fired: Fired) -> None:
    """Where the window's pool has the slots of a forward is looked up once and kept, and what is kept is not thrown away when the mapping has been written anew. A chunk of as
    many tokens as the last one has its window's K and V written into that one's slots."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    kept: dict = {}

    @replaces(TorchNativeAttnBackend, "init_forward_metadata")
    def init_forward_metadata(before, backend, batch):
        before(backend, batch)
        right = backend.swa_out_cache_loc
        if right is None or batch.forward_mode.is_decode():
            return
        stale = kept.get(right.numel())
        if stale is not None and bool((stale != right).any()):
            fired()
            backend.swa_out_cache_loc = stale.clone()
        kept.clear()
        kept[right.numel()] = right.clone()


@bug("sgl-project/sglang#26941", "recurrent-retract", "state_restored_for_other_prefix")
def retracted_request_still_names_its_state_slot(fired: Fired) -> None:
    """A request that is retracted gives its state's slot back, and its own note of the slot stays. When it is resumed it is not given another, because it seems to have one:
    that slot is somebody else's by then."""
    from sglang.srt.managers.schedule_batch import Req

    noted: dict[str, int] = {}

    @replaces(Req, "reset_for_retract")
    def reset_for_retract(before, req):
        row = rows.get(req.rid)
        before(req)
        if row is not None:
            req.kv.mamba_pool_idx = row.clone()
            noted[req.rid] = int(row)

    rows: dict = {}

    def look(runner, batch, _):
        pool = runner.req_to_token_pool
        slots = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices]
        for name, slot in zip(batch.rids, slots, strict=True):
            rows[name] = slot.clone()
        own = slots.tolist()
        if any(noted.get(n) == slot and own.count(slot) > 1 for n, slot in zip(batch.rids, own, strict=True)):
            fired()

    before_forward(look)


@bug("sgl-project/sglang-jax#971", "llama-long", "row_reassigned_in_flight", "req_to_token", origin="SGLang JAX")
def third_chunk_finds_the_request_done(fired: Fired) -> None:
    """How many chunks a request has under way is counted down once more than up, and at its second chunk it is taken for one that has ended: its lock on the prefix cache and
    its row are given back. Its third chunk goes on in that row, and so does the next request."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    chunks: dict[str, int] = {}
    lost: set[int] = set()

    def look(runner, batch, rows):
        own = batch.req_pool_indices.tolist()
        if any(own.count(row) > 1 for row in lost):
            fired()

    before_forward(look)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        before(cache, req, up_to=up_to, **kwargs)
        if req.finished():
            return
        chunks[req.rid] = chunks.get(req.rid, 0) + 1
        if chunks[req.rid] == 2 and up_to < len(req.origin_input_ids) and not lost:
            cache.unlock(req.lock)
            req.lock = None
            lost.add(req.kv.req_pool_idx)
            cache.req_to_token_pool.free_slots.append(req.kv.req_pool_idx)


@bug("sgl-project/sglang#23075", "recurrent-mixed", "state_restored_for_other_prefix")
def states_of_a_mixed_batch_are_saved_by_the_decodes_rows(fired: Fired) -> None:
    """Which states of a batch are to be saved for the prefix cache is looked up among all of its rows, and those of decodes that are computed along are among them. What is kept
    for a prompt's prefix is the state of a request that was decoding."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    mixed: list[tuple[set[str], int]] = []  # prefills of the last batch, and a decode's state slot
    saved: list[list[int]] = []  # the prefixes
    hit: set[str] = set()

    def look(runner, batch, rows):
        mixed.clear()
        slots = runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        if hit & set(batch.rids):
            fired()
        if batch.forward_mode.is_mixed():
            counts = batch.extend_seq_lens.tolist()
            decodes = [slot for slot, n, (prefix, *_) in zip(slots, counts, rows, strict=True) if n == 1 and prefix]
            names = {name for name, n in zip(batch.rids, counts, strict=True) if n > 1}
            mixed.extend([(names, decodes[0])] if decodes else [])

    before_forward(look)

    @replaces(UnifiedRadixCache, "match_prefix")
    def match_prefix(before, cache, params):
        result = before(cache, params)
        if params.req is not None and list(params.key.token_ids[: result.device_prefix_len]) in saved:
            hit.add(params.req.rid)
        return result

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, **kwargs):
        pool = cache.req_to_token_pool
        slot = int(pool.req_index_to_mamba_index_mapping[req.kv.req_pool_idx])
        parts = pool.mamba_pool.mamba_cache.conv
        own = [part[:, slot].clone() for part in parts]
        wrong = bool(mixed) and req.rid in mixed[0][0]
        if wrong:
            saved.append(list(req.full_untruncated_fill_ids[: kwargs["up_to"]]))
            for part in parts:
                part[:, slot] = part[:, mixed[0][1]]
        before(cache, req, **kwargs)
        if wrong and not req.finished():
            for part, state in zip(parts, own, strict=True):
                part[:, slot] = state


@bug("huggingface/transformers#46741", "recurrent", "state_restored_for_other_prefix", origin="transformers")
def later_chunk_begins_without_a_past(fired: Fired) -> None:
    """More than one token behind a filled cache is computed by the branch for prompts, and that branch begins with nothing. Each chunk of a prompt but the first is convolved as if
    no token stood before it, and leaves its state so."""
    known: set[str] = set()

    def look(runner, batch, rows):
        pool = runner.req_to_token_pool
        slots = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        for name, slot, (prefix, end, _) in zip(batch.rids, slots, rows, strict=True):
            if name in known and end - prefix > 1:
                fired()
                for part in pool.mamba_pool.mamba_cache.conv:
                    part[:, slot] = 0
            known.add(name)

    before_forward(look)
