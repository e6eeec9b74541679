"""Record mini-sglang (github.com/sgl-project/mini-sglang): `recorder = attach(llm, "trace.arrow")`, then `llm.generate(...)`.

An adapter as docs/guide/recording-your-engine.md makes one: five functions of the engine are wrapped, and nothing of it is
changed. FlashAttention's backend, with and without CUDA graphs, one rank. `tests/conformance/mini_sglang/` checks it.
"""

from kvcanary import BlockUse, EngineInfo, PagedRecorder


def attach(llm, path, **options):
    """Record an engine that has not run yet; the recorder that comes back is closed when the engine is done."""
    engine, cache, page = llm.engine, llm.cache_manager, llm.cache_manager.page_size
    graphs, attention = engine.graph_runner, engine.attn_backend
    pool, tables = engine.kv_cache, engine.page_table
    forward_batch, forward, replay = engine.forward_batch, engine.model.forward, attention.prepare_for_replay
    process, free = llm._process_last_data, llm._free_req_resources
    live, batch = {}, []  # requests that have pages, by uid; those of the forward that runs

    def blocks():
        held = {}
        for uid, req in live.items():
            length = req.device_len if req in batch else req.cached_len
            held[uid] = (tables[req.table_idx, :length:page] // page).tolist()
        nodes, cached = [cache.prefix_cache.root_node], []
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if not node.is_root():
                cached += (node.value[::page] // page).tolist()
        return BlockUse(held, cached=cached, free=(cache.free_slots // page).tolist())

    layers = range(pool.num_layers)
    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="mini-sglang"),
        keys={layer: pool.k_cache(layer) for layer in layers},
        values={layer: pool.v_cache(layer) for layer in layers},
        axes="block slot head dim",
        block_size=page,
        max_requests=tables.shape[0],
        max_len=tables.shape[1],
        num_layers=len(layers),
        padding_blocks=[cache.num_pages],  # where a graph's padding is written
        blocks=blocks,
        **options,
    )

    def tell(running, inputs, page_table, seq_lens):
        reqs = running.padded_reqs
        count = sum(req.extend_len for req in reqs)
        recorder.before_step(
            requests=[req.uid if req.uid >= 0 else None for req in reqs],
            prefix_lens=[req.cached_len for req in reqs],
            extend_lens=[req.extend_len for req in reqs],
            tokens=[req.input_ids for req in reqs],
            input_ids=inputs.input_ids[:count],
            positions=inputs.positions[:count],
            slots=inputs.out_loc[:count],
            block_tables=page_table,
            seq_lens=seq_lens,
        )

    def recorded_forward():  # without a graph: the model gets the batch
        running = engine.ctx.batch
        tell(running, running, running.attn_metadata.page_table, running.attn_metadata.cache_seqlens)
        return forward()

    def recorded_replay(running):  # with one: it gets the graph's buffers
        replay(running)
        size = running.padded_size
        tell(running, graphs.buffer, attention.capture.page_table[:size], attention.capture.seq_lens[:size])

    def recorded_batch(running, args):
        batch[:] = running.reqs
        live.update({req.uid: req for req in running.reqs})
        running.kvcanary_forward = recorder.next_forward
        output = forward_batch(running, args)
        batch.clear()
        recorder.after_forward()  # the next forward is launched before its tokens are known
        return output

    def recorded_process(last):
        if last is not None:
            reqs, (_, tokens, copied) = last[0].batch.reqs, last[1]
            copied.synchronize()
            lens = [int(type(req).__name__ != "ChunkedReq") for req in reqs]  # nobody reads a chunk's
            kept = [int(token) for token, one in zip(tokens, lens, strict=True) if one]
            lens += [0] * (last[0].batch.padded_size - len(reqs))
            recorder.sampled(forward=last[0].batch.kvcanary_forward, sampled_tokens=kept, sampled_lens=lens)
        process(last)

    def recorded_free(req):
        free(req)
        live.pop(req.uid, None)
        recorder.ended(req.uid)

    engine.forward_batch, engine.model.forward, attention.prepare_for_replay = (
        recorded_batch,
        recorded_forward,
        recorded_replay,
    )
    llm._process_last_data, llm._free_req_resources = recorded_process, recorded_free
    return recorder
