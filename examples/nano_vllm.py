"""Record nano-vllm (github.com/GeeeekExplorer/nano-vllm): `recorder = attach(llm, "trace.arrow")`, then `llm.generate(...)`.

An adapter as docs/guide/recording-your-engine.md makes one: two functions of the engine are wrapped, and nothing of it is
changed. Eager mode (`enforce_eager=True`), one rank. `tests/conformance/nano_vllm/` checks it.
"""

from kvcanary import BlockUse, EngineInfo, PagedRecorder


def attach(llm, path, **options):
    """Record an engine that has not run yet; the recorder that comes back is closed when the engine is done."""
    from nanovllm.utils.context import get_context

    runner, scheduler = llm.model_runner, llm.scheduler
    manager = scheduler.block_manager
    run, run_model, batch = runner.run, runner.run_model, []
    keys, values = runner.kv_cache  # [layer, block, slot, head, dim] each

    def blocks():
        tables = {seq.seq_id: seq.block_table for seq in (*scheduler.running, *scheduler.waiting)}
        counts = {block.block_id: block.ref_count for block in manager.blocks}
        return BlockUse(tables, manager.hash_to_block_id.values(), manager.free_block_ids, counts)

    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="nano-vllm"),
        keys=dict(enumerate(keys)),
        values=dict(enumerate(values)),
        watched=[0],
        axes="block slot head dim",
        block_size=runner.block_size,
        max_requests=scheduler.max_num_seqs,
        max_len=runner.config.max_model_len,
        num_layers=len(keys),
        blocks=blocks,
        **options,
    )

    def recorded_run(seqs, is_prefill):
        batch[:] = seqs
        tokens = run(seqs, is_prefill)
        ends = [seq.num_cached_tokens + seq.num_scheduled_tokens == len(seq) for seq in seqs]
        kept = [token for token, end in zip(tokens, ends, strict=True) if end]  # nobody reads a chunk's
        recorder.after_forward(sampled_tokens=kept, sampled_lens=[int(end) for end in ends])
        return tokens

    def recorded_model(input_ids, positions, is_prefill):
        context = get_context()
        recorder.before_step(
            requests=[seq.seq_id for seq in batch],
            prefix_lens=[seq.num_cached_tokens for seq in batch],
            extend_lens=[seq.num_scheduled_tokens for seq in batch],
            tokens=[seq.token_ids for seq in batch],
            input_ids=input_ids,
            positions=positions,
            slots=context.slot_mapping,
            block_tables=context.block_tables,
            seq_lens=context.cu_seqlens_k.diff() if is_prefill else context.context_lens,
            query_lens=context.cu_seqlens_q.diff() if is_prefill else None,
        )
        return run_model(input_ids, positions, is_prefill)

    runner.run, runner.run_model = recorded_run, recorded_model
    return recorder
