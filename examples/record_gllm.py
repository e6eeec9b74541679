"""Record gLLM (github.com/gty111/gLLM): `recorder = attach(worker, "trace.arrow")` when its OverlapWorker has been initialized.

An adapter as docs/guide/recording-your-engine.md makes one: five functions of the engine are wrapped, and nothing of it is
changed. Overlap scheduling, FlashAttention with and without CUDA graphs, one rank. `tests/conformance/gllm/` checks it.
"""

from collections import deque

from kvcanary import BlockUse, EngineInfo, PagedRecorder


def attach(worker, path, **options):
    """Record a worker that has not run yet; the recorder that comes back is closed when the engine is done."""
    runner, scheduler = worker.model_runner, worker.scheduler
    memory, inputs = runner.memory_manager, runner.input_data
    pool, page = memory.segment, memory.page_size
    forward, pad, run_batch = runner.forward, inputs.pad_for_cuda_graph, runner.run_batch_async
    finalize, abort = scheduler.process_output_finalize, scheduler.check_abort_seqs
    told = []  # of the forward that runs: the requests of each part that it is told in, and rows of padding
    launched = deque()  # forwards whose tokens are not known yet, each with the places of its requests in the batch

    def blocks():
        running = [seq for batch in scheduler.batch_running for seq in batch]
        held = [*running, *scheduler.seqs_to_decode, *scheduler.seqs_to_prefill]
        # The rest of a prompt is a copy of its request, which comes last.
        tables = {seq.seq_id: list(seq.page_table) for seq in held if seq.page_table}
        # gLLM enters a page into its cache when it gives it out; it is lent when it has been filled.
        unfilled = {block for seq in held for block in seq.page_table[seq.computed_token_num // page :]}
        cached = [block for block in getattr(pool, "hash2page", {}).values() if block not in unfilled]
        counts = dict(enumerate(getattr(pool, "page_ref_num", ())))
        return BlockUse(tables, cached=cached, free=pool.id_allocator.free_ids, counts=counts)

    layers = range(pool.num_layers)
    recorder = PagedRecorder(
        path,
        engine=EngineInfo(name="gllm"),
        keys={layer: pool.k_cache[layer] for layer in layers},
        values={layer: pool.v_cache[layer] for layer in layers},
        axes="block slot head dim",
        block_size=page,
        max_requests=runner.max_running_seqs,
        max_len=runner.model_max_length,
        num_layers=len(layers),
        padding_blocks=[] if memory.dummy_page is None else [memory.dummy_page],
        blocks=blocks,
        **options,
    )

    def tell(number):
        """Tell the part of a forward that some requests of the batch are, with its rows of padding."""
        part, padding = told[number]
        seqs, starts = inputs.seqs, inputs.query_start_loc_cpu.tolist()
        padding = range(len(seqs), len(seqs) + padding)
        tokens = [t for row in part for t in range(starts[row], starts[row + 1])]
        tokens += range(starts[-1], starts[-1] + len(padding))
        rows = [*part, *padding]
        recorder.before_step(
            requests=[seqs[row].seq_id for row in part] + [None for _ in padding],
            prefix_lens=[seqs[row].computed_token_num for row in part] + [0 for _ in padding],
            extend_lens=[seqs[row].to_compute_token_num for row in part] + [1 for _ in padding],
            tokens=[known(seqs[row].token_ids) for row in part] + [[] for _ in padding],
            input_ids=inputs.tokens[tokens],
            positions=inputs.positions[tokens],
            slots=inputs.slot_mapping[tokens],
            block_tables=inputs.block_table[rows],
            seq_lens=inputs.seq_lens[rows],
            part=number,
        )

    def known(tokens):
        return tokens[: next((n for n, token in enumerate(tokens) if token < 0), len(tokens))]

    def parts():
        """Split a step into those that write what others of it read, and these: all is stored before any of it attends."""
        starts, rest, waves = inputs.query_start_loc_cpu.tolist(), list(range(len(inputs.seqs))), []
        written = {row: set(inputs.slot_mapping[starts[row] : starts[row + 1]].tolist()) for row in rest}
        read = {}
        for row, seq in enumerate(inputs.seqs):
            blocks = inputs.block_table[row].tolist()
            read[row] = {blocks[p // page] * page + p % page for p in range(seq.computed_token_num)}
        while rest:
            waves.append([row for row in rest if not any(read[row] & written[o] for o in rest if o != row)] or rest)
            rest = [row for row in rest if row not in waves[-1]]
        return waves

    def recorded_forward():  # without a graph
        told[:] = [(part, 0) for part in parts()]
        tell(0)
        return forward()

    def recorded_pad(size):  # with one: right before its replay
        count = pad(size)
        told[:] = [(range(len(inputs.seqs)), size - len(inputs.seqs))]
        tell(0)
        return count

    def recorded_batch(*args, **kwargs):
        first = recorder.next_forward
        output = run_batch(*args, **kwargs)
        recorder.after_forward()  # the next forward is launched before its tokens are known
        for number in range(1, len(told)):
            tell(number)
            recorder.after_forward()
        launched.append([(first + number, *part) for number, part in enumerate(told)])
        return output

    def recorded_finalize(deferred, next_tokens, logprobs=None):
        answered = {row for row, *_ in deferred or ()}  # of a prompt that goes on nobody reads the token
        for number, part, padding in launched.popleft():
            lens = [int(row in answered) for row in part] + [0] * padding
            kept = [next_tokens[row] for row in part if row in answered]
            recorder.sampled(forward=number, sampled_tokens=kept, sampled_lens=lens)
        return gone(finalize(deferred, next_tokens, logprobs))

    def gone(package):
        for number in package.free_ids if package else ():
            recorder.ended(number)
        return package

    runner.forward, inputs.pad_for_cuda_graph, runner.run_batch_async = recorded_forward, recorded_pad, recorded_batch
    scheduler.process_output_finalize, scheduler.check_abort_seqs = recorded_finalize, lambda: gone(abort())
    return recorder
