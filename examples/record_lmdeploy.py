"""Record LMDeploy's PyTorch engine (github.com/InternLM/lmdeploy): `recorder = attach(engine, loop, "trace.arrow")`, before its EngineLoop starts.

An adapter as docs/guide/recording-your-engine.md makes one: functions of the engine are wrapped, and nothing of it is changed.
One process and rank, with and without CUDA graphs, a step scheduled while the one before it runs. `tests/conformance/lmdeploy/`
checks it.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from kvcanary import BlockUse, EngineInfo, IdentityValue, PagedRecorder


@dataclass
class Step:
    """A forward, and what the scheduler had when it made it: the next one is scheduled before this one runs."""

    seqs: list
    prefixes: list
    extends: list
    answers: bool  # else it is a part of a prompt that goes on
    use: BlockUse
    changes: list  # what befell requests since the step before
    parts: list = field(default_factory=list)  # the rows of each forward that it is told as
    padding: int = 0
    first: int = 0  # the first one's number
    given: dict = field(default_factory=dict)  # what the model gets


def depends_on(seq, weights):
    """Return what a sequence's KV depends on beside its tokens; `weights` counts how often the model got new ones."""
    found = [IdentityValue("adapter", seq.adapter_name or ""), IdentityValue("salt", ""), IdentityValue("media", "")]
    media = [(span.content_hash, span) for span in seq.prefix_cache.multimodal_spans]
    for embedded in seq.history_embeddings.embeddings:
        values = np.ascontiguousarray(embedded.embeddings).tobytes()
        media.append((hashlib.blake2b(values, digest_size=16).hexdigest(), embedded))
    found += [IdentityValue("media", held, one.start, one.end - one.start) for held, one in media]
    return [*found, IdentityValue("weights", str(weights))]


def attach(engine, loop, path, **options):
    """Record an engine that has not run yet; the recorder that comes back is closed when the engine is done."""
    scheduler, maker, agent = engine.scheduler, loop.inputs_maker, engine.executor.model_agent
    manager, trie, config = scheduler.block_manager, scheduler.block_trie, engine.cache_config
    model, caches = agent.patched_model.get_model(), agent.cache_engine.gpu_cache
    make, run, outputs = maker._make_forward_inputs, agent._forward_impl, loop._make_infer_outputs
    end, free, fill, forward = scheduler.end_session, manager.free, model.fill_buffers_cudagraph, model.forward
    size = config.kernel_block_size
    split = config.block_size // size  # kernels have smaller blocks than the scheduler, if they are asked to
    made, flying = deque(), deque()  # steps that have not run, and those whose tokens are not known
    ends, changes, running = {}, [], []  # of each sequence what has been given to the model; the step that runs
    declared, updates = {}, [0]  # what sequences had when they declared it; how often new weights came
    update = agent.update_params

    def kernel_blocks(blocks):
        return (np.asarray(blocks, np.int64)[:, None] * split + np.arange(split)).ravel().tolist()

    def look(prefixes, batch=()):
        """Return who has which blocks; `prefixes` is how much of a sequence's is filled when the step begins."""
        known = {seq.seq_id: seq for seq in (*scheduler.seq_manager.get_all_sequences(), *batch)}
        seqs = [seq for seq in known.values() if seq.num_blocks]
        tables = {seq.seq_id: manager.get_block_table(seq) for seq in seqs}
        unfilled = set()  # a block is entered into the trie when it is given out
        for seq in seqs:
            filled = prefixes.get(seq.seq_id, ends.get(seq.seq_id, seq.num_history_ids))
            unfilled.update(tables[seq.seq_id][filled // config.block_size :].tolist())
        nodes, cached = list(trie._roots.values()), []
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.block_id >= 0:
                cached.append(int(manager.allocator.get_physical_blocks(node.block_id)))
        blocks = manager.allocator.get_phy_allocator("gpu")
        unused = blocks._free_blocks[blocks._num_blocks - blocks._free_count :]
        return BlockUse(
            {seq_id: kernel_blocks(table) for seq_id, table in tables.items()},
            cached=kernel_blocks([block for block in cached if block not in unfilled]),
            free=kernel_blocks(unused),
        )

    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="lmdeploy"),
        keys={layer: cache[0] for layer, cache in enumerate(caches)},
        values={layer: cache[1] for layer, cache in enumerate(caches)},
        axes="block slot head dim",
        block_size=size,
        max_requests=config.max_batches,
        max_len=engine.max_session_len + config.block_size,
        num_layers=len(caches),
        padding_blocks=kernel_blocks(range(config.num_reserved_gpu_blocks)),
        blocks=lambda: running[0].use if running else look({}),
        **options,
    )

    def recorded_make(*args, **kwargs):
        forward_inputs = make(*args, **kwargs)
        if forward_inputs is None:
            return None
        seqs, inputs = list(forward_inputs["running"]), forward_inputs["inputs"]
        if inputs is None:  # a token of each, which may not be known yet
            under_way = [seq.seq_id for step in flying if step.answers for seq in step.seqs]
            prefixes = [seq.num_all_ids + under_way.count(seq.seq_id) - 1 for seq in seqs]
            extends = [1] * len(seqs)
        else:
            prefixes = [seq.num_history_ids for seq in seqs]
            extends = [(seq.kv_token_limit or seq.num_all_ids) - seq.num_history_ids for seq in seqs]
        numbers = [seq.seq_id for seq in seqs]
        use = look(dict(zip(numbers, prefixes, strict=True)), seqs)
        ends.update({n: prefix + new for n, prefix, new in zip(numbers, prefixes, extends, strict=True)})
        answers = inputs is None or not inputs.is_chunk or inputs.is_last_chunk
        made.append(Step(seqs, prefixes, extends, answers, use, changes[:]))
        flying.append(made[-1])
        changes.clear()
        return forward_inputs

    def tell(number, padding):
        step, given = running[0], running[0].given
        attention = given["attn_metadata"]
        starts, lens = attention.q_start_loc.tolist(), attention.q_seqlens.tolist()
        part = step.parts[number]
        for seq in (step.seqs[row] for row in part):
            has = len(seq.history_embeddings.embeddings), len(seq.prefix_cache.multimodal_spans), updates[0]
            if declared.get(seq.seq_id) != has:
                declared[seq.seq_id] = has
                recorder.declare(seq.seq_id, depends_on(seq, updates[0]))
        rows = [*part, *range(len(step.seqs), len(step.seqs) + padding)]
        slots, tokens = written(attention), [t for row in part for t in range(starts[row], starts[row] + lens[row])]
        if padding:  # all are told, and where those of padding begin is not filled in
            tokens = list(range(given["input_ids"].numel()))
        recorder.before_step(
            requests=[step.seqs[row].seq_id for row in part] + [None] * padding,
            prefix_lens=[step.prefixes[row] for row in part] + [0] * padding,
            extend_lens=[step.extends[row] for row in part] + [1] * padding,
            tokens=[step.seqs[row].all_ids.copy() for row in part] + [[]] * padding,
            input_ids=given["input_ids"].flatten()[tokens],
            positions=given["position_ids"].flatten()[tokens],
            slots=np.concatenate([slots[row] for row in rows]),
            block_tables=attention.block_offsets[rows],
            seq_lens=attention.kv_seqlens[rows],
            query_lens=attention.q_seqlens[rows],
            part=number,
        )

    def written(attention):
        """Return where the kernel that fills the cache puts each request's new tokens: it has no slots but these."""
        found = []
        for table, new, length in zip(
            attention.block_offsets.tolist(), attention.q_seqlens.tolist(), attention.kv_seqlens.tolist(), strict=True
        ):
            found.append([table[p // size] * size + p % size for p in range(length - new, length)])
        return found

    def parts(attention):
        """Split a step into those that write what others of it read, and these: all is stored before any of it attends."""
        step, slots, tables = running[0], written(attention), attention.block_offsets.tolist()
        rest, waves = list(range(len(step.seqs))), []
        read = {row: {tables[row][p // size] * size + p % size for p in range(step.prefixes[row])} for row in rest}
        while rest:
            waves.append([row for row in rest if not any(read[row] & set(slots[o]) for o in rest if o != row)] or rest)
            rest = [row for row in rest if row not in waves[-1]]
        return waves

    def told(given):
        """Tell the step that runs what the model is given, once."""
        if running and not running[0].parts:
            step = running[0]
            step.given = given
            for change, number in step.changes:
                change(number)
            step.padding = len(given["attn_metadata"].q_seqlens) - len(step.seqs)
            step.parts = [list(range(len(step.seqs)))] if step.padding else parts(given["attn_metadata"])
            step.first = recorder.next_forward
            tell(0, step.padding)

    def recorded_fill(*args, **given):
        padded = fill(*args, **given)
        told(padded)  # the graph's buffers, right before its replay
        return padded

    def recorded_forward(*args, **given):
        if not given["attn_metadata"].is_decoding or agent.backend_config.eager_mode:
            told(given)
        return forward(*args, **given)

    def recorded_run(inputs, **rest):
        if inputs.is_dummy:
            return run(inputs, **rest)
        running.append(made.popleft())
        output = run(inputs, **rest)
        recorder.after_forward()  # the next forward is scheduled before its tokens are known
        for number in range(1, len(running[0].parts)):
            tell(number, 0)
            recorder.after_forward()
        running.clear()
        return output

    def recorded_outputs(batched_outputs, **rest):
        step, tokens = flying.popleft(), batched_outputs.next_token_ids.flatten().tolist()
        kept = [step.answers and seq.status.name == "RUNNING" for seq in step.seqs]  # others have ended meanwhile
        for number, part in enumerate(step.parts):
            lens = [int(kept[row]) for row in part] + [0] * step.padding
            mine = [tokens[row] for row in part if kept[row]]
            recorder.sampled(forward=step.first + number, sampled_tokens=mine, sampled_lens=lens)
        return outputs(batched_outputs, **rest)

    def recorded_free(seq):
        if ends.pop(seq.seq_id, None) is not None:
            changes.append((recorder.preempted, seq.seq_id))
        free(seq)

    def recorded_end(session_id):
        numbers = list(scheduler.sessions[session_id].sequences)
        end(session_id)
        for number in numbers:
            declared.pop(number, None)
        changes.extend((recorder.ended, number) for number in numbers)

    def recorded_update(request):
        update(request)
        updates[0] += 1

    agent.update_params = recorded_update
    maker._make_forward_inputs, agent._forward_impl, loop._make_infer_outputs = (
        recorded_make,
        recorded_run,
        recorded_outputs,
    )
    scheduler.end_session, manager.free = recorded_end, recorded_free
    model.fill_buffers_cudagraph, model.forward = recorded_fill, recorded_forward
    return recorder
