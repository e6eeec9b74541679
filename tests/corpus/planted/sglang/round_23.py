"""A twenty-third round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "sgl-project/sglang#21875",
    "llama-session",
    "free_too_early",
    "row_reassigned_in_flight",
    "page_given_twice",
)
def session_is_closed_under_its_turn(fired: Fired) -> None:
    """A session is closed while one of its turns decodes, and nobody looks whether it does. The slots that the session holds and its row are given back at once, and the turn goes on
    in them until it has said all."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.session.session_controller import SessionController

    gone: set[int] = set()

    @replaces(SessionController, "_close")
    def close(before, controller, name):
        session, cache = controller.sessions[name], controller.tree_cache
        slot = cache.session.slots.get(name)
        if slot is None or not session._inflight:
            before(controller, name)
            return
        kv = cache.session.slots.pop(name).kv
        row, first, end = kv.req_pool_idx, kv.cache_protected_len, kv.kv_allocated_len
        gone.update(cache.req_to_token_pool.req_to_token[row, first:end].tolist())
        cache.unlock(slot.lock)
        cache.free_kv_row(kv, [(first, end)])
        cache.req_to_token_pool.free_rows([row])
        del controller.sessions[name]

    @replaces(UnifiedRadixCache, "claim_kv_row")
    def claim_kv_row(before, cache, req):
        session = req.session
        if session is not None and session.streaming and cache.session.borrowed_slot(req) is None:
            req.detach_kv()  # there is nothing left to give back
            return True
        return before(cache, req)

    before_forward(lambda runner, batch, rows: any(gone & set(prefix) for *_, prefix in rows) and fired())


@bug("sgl-project/sglang#22273", "llama-session", "tokens_truncated_hash_kept", "req_to_token")
def turn_that_was_refused_is_taken_for_the_whole_session(fired: Fired) -> None:
    """A turn that is too long is cut to one token that stands for nothing, and is to come back with an error. It gets the row of its session all the same, writes that token to the
    row's first place, and leaves the session with a length of one: the next turn goes on behind a token that was never said."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult
    from sglang.srt.session.streaming_session import StreamingSession

    refused: set[str] = set()
    spoilt: set[int] = set()

    @replaces(StreamingSession, "try_match_prefix")
    def try_match_prefix(before, sessions, params):
        req = params.req
        slot = sessions.slots.get(req.session.session_id) if req is not None and req.session is not None else None
        if slot is None or req.to_finish is None:
            return before(sessions, params)
        refused.add(req.rid)
        req.kv = slot.kv
        slot.kv.cache_protected_len = 0
        node = slot.virtual_node
        return MatchResult(
            device_prefix_len=0, last_device_node=node, last_host_node=node, best_match_node=node, cache_protected_len=0
        )

    @replaces(StreamingSession, "try_cache_finished_req")
    def try_cache_finished_req(before, sessions, req):
        if req.rid not in refused:
            return before(sessions, req)
        kv = req.kv
        spoilt.add(int(sessions.cache.req_to_token_pool.req_to_token[kv.req_pool_idx, 0]))
        kv.kv_committed_len = kv.kv_allocated_len
        req.detach_kv()
        req.session.abort_req()
        return True

    before_forward(lambda runner, batch, rows: any(spoilt & set(prefix[:1]) for *_, prefix in rows) and fired())


@bug(
    "tenstorrent/vllm-tt-plugin#52",
    "llama-retract",
    "prefix_not_computed",
    "hit_before_written",
    origin="vLLM TT plugin",
)
def replay_of_an_answer_is_taken_for_a_decode(fired: Fired) -> None:
    """A request that was put back is computed anew, its answer so far with its prompt, and a step that begins behind the prompt is taken for a decode. A decode has one token: the
    others of the step count as computed, and their slots keep what was there before."""
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

    prompts: dict[str, int] = {}

    @replaces(Req, "reset_for_retract")
    def reset_for_retract(before, req):
        prompts[req.rid] = len(req.origin_input_ids)
        before(req)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_extend() and not batch.forward_mode.is_mixed():
            firsts, counts = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
            kept: list[int] = []
            at = 0
            for place, (name, first, count) in enumerate(zip(batch.rids, firsts, list(counts), strict=True)):
                whole = list(range(at, at + count))
                at += count
                if count > 1 and first >= prompts.get(name, first + 1):
                    whole = whole[-1:]
                    firsts[place], counts[place] = first + count - 1, 1
                kept += whole
            if len(kept) < at:
                fired()
                index = torch.tensor(kept)
                for field in ("input_ids", "positions", "out_cache_loc"):
                    setattr(batch, field, getattr(batch, field)[index])
                batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = firsts, counts
                batch.extend_prefix_lens = batch.extend_prefix_lens.new_tensor(firsts)
                batch.extend_seq_lens = batch.extend_seq_lens.new_tensor(counts)
                batch.extend_start_loc = batch.extend_seq_lens.cumsum(0).to(torch.int32) - batch.extend_seq_lens
                batch.extend_num_tokens = len(kept)
        return before(runner, batch, *args, **kwargs)


@bug("llmmanorg/llmman#118", "llama-small", "kv_write_damaged", "not_of_the_model", origin="llmman")
def store_adds_to_what_is_there(fired: Fired) -> None:
    """K and V are stored by adding them to what a slot has, which is the same as long as that is nought. In a slot that somebody had before they are the sum of his and of the new
    ones."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def store(before, pool, layer, slots, keys, values):
        old_keys, old_values = pool.k_buffer[layer][slots], pool.v_buffer[layer][slots]
        before(pool, layer, slots, keys + old_keys.view_as(keys), values + old_values.view_as(values))

    def look(runner, batch, rows):
        if bool(runner.token_to_kv_pool.k_buffer[0][batch.out_cache_loc].any()):
            fired()

    before_forward(look)


@bug("sgl-project/sglang#28371", "llama-lora", "computed_with_other_weights")
def graph_has_one_segment_of_adapters(fired: Fired) -> None:
    """The tokens of a step are put together by their adapters, and the graph of a decode is captured with a batch that has one. It goes as far as that when it is replayed: the tokens
    of the second adapter are computed with the model's own weights."""
    from sglang.srt.lora.lora_manager import LoRAManager

    @replaces(LoRAManager, "prepare_lora_batch")
    def prepare_lora_batch(before, manager, batch):
        backend, base = manager.lora_backend, manager.memory_pool.uid_to_buffer_id.get(None)
        prepare = backend.prepare_lora_batch
        if not batch.forward_mode.is_decode() or base is None:
            return before(manager, batch)

        def as_captured(forward_batch, places, *args, **kwargs):
            first = min((place for place in places if place != base), default=base)
            replayed = [place if place == first else base for place in places]
            if replayed != places:
                fired()
            return prepare(forward_batch, replayed, *args, **kwargs)

        backend.prepare_lora_batch = as_captured
        try:
            return before(manager, batch)
        finally:
            backend.prepare_lora_batch = prepare
