"""Record LightLLM (github.com/ModelTC/LightLLM): `recorder = attach(backend, "trace.arrow")` when its ChunkedPrefillBackend has a model.

An adapter as docs/guide/recording-your-engine.md makes one: functions of the engine are wrapped, and nothing of it is changed.
Two overlapping turns of the inference loop, with and without CUDA graphs, one rank. `tests/conformance/lightllm/` checks it.
"""

from collections import deque

from kvcanary import BlockUse, EngineInfo, IdentityValue, PagedRecorder


def attach(backend, path, **options):
    """Record a backend that has not run yet; the recorder that comes back is closed when the engine is done."""
    from lightllm.server.router.model_infer.infer_batch import g_infer_context as context

    model, radix = backend.model, backend.radix_cache
    pool, rows = model.mem_manager, model.req_manager
    table, slots = rows.req_to_token_indexs, pool.allocator
    prefill, decode, forward, post = backend.prefill, backend.decode, model.forward, backend._post_handle
    leave, pause, load = context._filter, context.pause_reqs, model.load_weights
    loads, declared = [0], {}  # how often new weights came; of each request what its KV depends on beside its tokens
    batch = []  # the requests of the forward that runs
    told = {"prefill": False, "rows": 0}  # what it is, and how many rows it has, padding's too
    launched = deque()  # forwards whose tokens are not known yet, and their rows
    given = {}  # request -> the slots of its positions, as the cache and the allocator gave them, before they are in the table

    def blocks():
        held = {}
        for req in context.requests_mapping.values():
            length = length_of(req) if req in batch else req.cur_kv_len
            if req.req_id in given:
                held[req.req_id] = given[req.req_id][:length]
        nodes, cached = [radix.root_node] if radix else [], []
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            cached += node.token_mem_index_value.tolist()
        return BlockUse(held, cached=cached, free=slots.mem_state[slots.mark_start : slots.mark_end].tolist())

    layers = range(pool.layer_num)
    halves = [pool.get_att_input_params(layer) for layer in layers]
    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="lightllm"),
        keys={layer: halves[layer][0] for layer in layers},
        values={layer: halves[layer][1] for layer in layers},
        axes="slot head dim",
        block_size=1,  # a table of slots
        max_requests=table.shape[0],
        max_len=table.shape[1],
        num_layers=len(layers),
        padding_blocks=[pool.HOLD_TOKEN_MEMINDEX],
        blocks=blocks,
        **options,
    )

    def length_of(req):
        """How many tokens a request has when the forward is done."""
        return req.get_chuncked_input_token_len() if told["prefill"] else req.get_cur_total_len()

    def tell(state):
        told["rows"] = len(state.b_req_idx)
        padding = told["rows"] - len(batch)
        lens = state.b_seq_len[len(batch) :].tolist()  # of padding
        prefixes = [req.cur_kv_len for req in batch]
        for req in batch:
            if declared.get(req.req_id) != (identity := depends_on(req)):
                declared[req.req_id] = identity
                recorder.declare(req.req_id, identity)
        new = lens if state.is_prefill else [1] * padding
        recorder.before_step(
            requests=[req.req_id for req in batch] + [None] * padding,
            prefix_lens=prefixes + [0] * padding,
            extend_lens=[length_of(req) - prefix for req, prefix in zip(batch, prefixes, strict=True)] + new,
            tokens=[known(req.shm_req) for req in batch] + [[]] * padding,
            input_ids=state.input_ids,
            positions=state.position_ids,
            slots=state.mem_index,
            block_tables=table[state.b_req_idx.long()],
            seq_lens=state.b_seq_len,
        )

    def depends_on(req):
        media = req.multimodal_params
        none = ("adapter", "salt") if media.get("images") or media.get("audios") else ("adapter", "salt", "media")
        return [*(IdentityValue(kind, "") for kind in none), IdentityValue("weights", str(loads[0]))]

    def known(req):
        return req.shm_prompt_ids.arr[: req.input_len + req.shm_cur_output_len].copy()

    def recorded_turn(turn, name):
        def run(event_pack, **reqs):
            batch[:], told["prefill"] = reqs[name], name == "prefill_reqs"
            return turn(event_pack=event_pack, **reqs)

        return run

    def recorded_forward(model_input):
        slots_left = model_input.mem_indexes_cpu.tolist()
        for req in batch:
            mine = given.setdefault(req.req_id, [])
            if req.shared_kv_node is not None and len(mine) < req.cur_kv_len:  # it begins, or comes back
                mine[:] = radix.get_mem_index_value_by_node(req.shared_kv_node).tolist()
            new = length_of(req) - req.cur_kv_len
            mine[req.cur_kv_len :], slots_left = slots_left[:new], slots_left[new:]
        number = recorder.next_forward
        output = forward(model_input)
        launched.append((number, told["rows"]))
        batch.clear()
        recorder.after_forward()  # the next forward is launched before its tokens are known
        return output

    def recorded_post(run_reqs, next_token_ids, next_token_logprobs, next_token_ranks, run_reqs_update_packs, **rest):
        lens = [int(pack.output_len > 0) for pack in run_reqs_update_packs]  # of a prompt that goes on nobody reads it
        kept = [int(token) for token, one in zip(next_token_ids, lens, strict=True) if one]
        number, told_rows = launched.popleft()
        recorder.sampled(forward=number, sampled_tokens=kept, sampled_lens=lens + [0] * (told_rows - len(lens)))
        post(run_reqs, next_token_ids, next_token_logprobs, next_token_ranks, run_reqs_update_packs, **rest)

    def recorded_pause(reqs, **rest):
        pause(reqs, **rest)
        for req in reqs:
            given.pop(req.req_id, None)
            recorder.preempted(req.req_id)

    def recorded_leave(numbers, **rest):
        leave(numbers, **rest)
        for number in numbers:
            given.pop(number, None)
            declared.pop(number, None)
            recorder.ended(number)

    def recorded_load(weights):
        load(weights)
        loads[0] += 1

    def told_before(run):
        def instead(state):
            tell(state)
            return run(state)

        return instead

    def told_behind(state):
        copy = state.copy_for_cuda_graph

        def instead(new):
            copy(new)
            tell(state)

        return instead

    for _, state, _ in model.graph.graph.values() if model.graph else ():
        state.copy_for_cuda_graph = told_behind(state)  # right before its replay
    for name in ("_context_forward", "_token_forward"):
        setattr(model, name, told_before(getattr(model, name)))
    model.forward, backend._post_handle = recorded_forward, recorded_post
    backend.prefill, backend.decode = recorded_turn(prefill, "prefill_reqs"), recorded_turn(decode, "decode_reqs")
    model.load_weights, context._filter, context.pause_reqs = recorded_load, recorded_leave, recorded_pause
    return recorder
