"""Record swiftLLM (github.com/interestingLSY/swiftLLM): `recorder = attach(engine, "trace.arrow")` when its Engine has been initialized.

An adapter as docs/guide/recording-your-engine.md makes one: functions of the engine are wrapped, and nothing of it is changed.
One GPU, with what is swapped to the host's memory and back. `tests/conformance/swiftllm/` checks it.
"""

from itertools import count

import numpy as np
from kvcanary import TIER_HOST, TIER_POOL, BlockUse, CopyEnds, EngineInfo, PagedRecorder
from kvcanary.kernels.ops.end_hash.reference import end_hashes


def attach(engine, path, **options):
    """Record an engine that has not run yet; the recorder that comes back is closed when the engine is done."""
    from swiftllm.worker.model import swiftllm_c

    model, scheduler, config = engine.model, engine.scheduler, engine.engine_config
    manager, size = model.gpu_block_manager, config.block_size
    next_batch, forward, finish, swap = (
        scheduler.get_next_batch,
        model._forward,
        scheduler.on_batch_finish,
        swiftllm_c.swap_blocks,
    )
    batch, numbers, numbered = (
        [],
        {},
        count(),
    )  # whom the step computes; a number for each request, since ids are reused
    angles = np.hstack([model._cos_cached.cpu(), model._sin_cached.cpu()])
    # The model is given no positions but these.
    places = {row.tobytes(): position for position, row in enumerate(angles)}

    def blocks():
        given = manager.num_seq_allocated_blocks.tolist()
        held = {
            numbers[req]: manager.block_table[req.request_id, : given[req.request_id]].tolist()
            for req in (*scheduler.running_q, *scheduler.swapped_q)
        }
        return BlockUse(held, free=manager.is_block_free.nonzero().flatten().tolist())

    layers = range(model.k_cache.shape[1])
    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="swiftllm"),
        keys={layer: model.k_cache[:, layer] for layer in layers},
        values={layer: model.v_cache[:, layer] for layer in layers},
        axes="block head slot dim",
        block_size=size,
        max_requests=config.max_batch_size,
        max_len=config.max_blocks_per_seq * size,
        num_layers=len(layers),
        blocks=blocks,
        host_blocks=config.num_cpu_blocks,
        **options,
    )

    def tell(input_ids, state):
        rows, prompts = state.seq_ids.long(), state.num_prefill_seqs
        lens = state.prefill_seq_lens.tolist() + state.decoding_seq_lens.tolist()
        slots = []  # as the kernels that fill the cache find them
        for number, (row, length) in enumerate(zip(rows.tolist(), lens, strict=True)):
            new = np.arange(0 if number < prompts else length - 1, length)
            slots.append(manager.block_table[row].cpu().numpy()[new // size] * size + new % size)
        given = np.hstack([state.position_cos.cpu(), state.position_sin.cpu()])
        prefixes = [0 if req.is_prefill_stage() else req.prompt_len + req.get_cur_output_len() - 1 for req in batch]
        recorder.before_step(
            requests=[numbers[req] for req in batch],
            prefix_lens=prefixes,
            extend_lens=[req.prompt_len if req.is_prefill_stage() else 1 for req in batch],
            tokens=[req.prompt_token_ids + req.output_token_ids for req in batch],
            input_ids=input_ids,
            positions=[places.get(row.tobytes(), -1) for row in given],
            slots=np.concatenate(slots),
            # Prompts attend to what they bring.
            block_tables=manager.block_table[rows] if prompts < len(batch) else None,
            seq_lens=lens,
        )

    def recorded_next():
        made = next_batch()
        batch[:] = made[0]
        for req in (*scheduler.running_q, *scheduler.swapped_q):
            if req not in numbers:
                numbers[req] = next(numbered)
        return made

    def recorded_forward(input_ids, infer_state):
        if not batch:  # an engine that has nothing to do runs forwards of nobody
            return forward(input_ids, infer_state)
        tell(input_ids, infer_state)
        tokens = forward(input_ids, infer_state)
        recorder.after_forward(sampled_tokens=tokens, sampled_lens=[1] * len(batch))
        return tokens

    def recorded_finish(done):
        finish(done)
        for req in done:
            if req.is_finished():
                recorder.ended(numbers.pop(req))

    def hashed(pools, places):
        return end_hashes([pool[places].cpu().contiguous().flatten(1).numpy().view(np.uint8) for pool in pools])

    def recorded_swap(src, dst, is_swap_in, k_cache, v_cache, k_swap, v_swap):
        if not src:  # which is each step
            return
        tiers, ends = (TIER_POOL, TIER_HOST), ((k_cache, v_cache), (k_swap, v_swap))
        if is_swap_in:
            tiers, ends = tiers[::-1], ends[::-1]
        given, before = hashed(ends[0], src), hashed(ends[1], dst)
        swap(src, dst, is_swap_in, k_cache, v_cache, k_swap, v_swap)
        recorder.kv_copy(
            group=0,
            src=[block * size for block in src],
            dst=[block * size for block in dst],
            count=[size] * len(src),
            src_tier=tiers[0],
            dst_tier=tiers[1],
            note="load-back" if is_swap_in else "offload",
            ends=CopyEnds(given, hashed(ends[1], dst), before, np.full(len(src), -1)),
        )

    scheduler.get_next_batch, scheduler.on_batch_finish = recorded_next, recorded_finish
    model._forward, swiftllm_c.swap_blocks = recorded_forward, recorded_swap
    return recorder
