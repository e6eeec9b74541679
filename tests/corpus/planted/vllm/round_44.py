"""A forty-fourth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, parts_of, states_of


@bug("EricLBuehler/mistral.rs#2094", "hybrid-decodes", "window_read_wrong", origin="mistral.rs")
def decodes_are_not_told_of_the_window(fired: Fired) -> None:
    """All layers keep the whole context in pages, and the kernel has to leave out what lies before the window where a layer
    has one. For prompts it is told how long the window is; for decodes the argument is left out, and in these layers
    each new token attends to all that came before it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    @replaces(SlidingWindowManager, "remove_skipped_blocks")
    def remove_skipped_blocks(before, manager, *args, **kwargs):
        return None

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        window = builder.window_size
        if common.max_query_len > 1 or window <= 0:
            return before(builder, common_prefix_len, common, *args, **kwargs)
        if int(common.seq_lens.max()) > window:
            fired()
        builder.window_size = -1
        try:
            return before(builder, common_prefix_len, common, *args, **kwargs)
        finally:
            builder.window_size = window

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, *args, **kwargs):
        window = impl.sliding_window
        if metadata is not None and metadata.max_query_len == 1:
            impl.sliding_window = -1
        try:
            return before(impl, layer, query, key, value, cache, metadata, *args, **kwargs)
        finally:
            impl.sliding_window = window


@bug("vllm-project/vllm-metal#488", "delta-returns", "state_restored_for_other_prefix", origin="vLLM Metal")
def request_that_was_put_back_goes_on_from_its_old_state(fired: Fired) -> None:
    """Each request has a slot of its own for its recurrent states, which is given back when it has ended. One that is put
    back when blocks are short keeps its slot as it is, and when it comes again its first token is computed
    behind the state of its last one; keys and values are written anew and are right."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    slots: dict[str, list[torch.Tensor]] = {}  # of a request that has been put back: what its slot holds
    begin: dict[int, list[torch.Tensor]] = {}  # by row of this step

    @replaces(Scheduler, "_preempt_request")
    def _preempt_request(before, scheduler, request, *args, **kwargs):
        request.skip_reading_prefix_cache = True  # such models have no prefix cache there
        return before(scheduler, request, *args, **kwargs)

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        group, layers = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        for name in output.preempted_req_ids or ():
            request = runner.requests[name]
            if request.num_computed_tokens:
                tokens = request.num_computed_tokens + given.get(name, 0)
                block = request.block_ids[group][(tokens - 1) // size]
                slots[name] = [part[block].clone() for part in parts_of(runner, layers)]
        given.clear()
        given.update(output.num_scheduled_tokens)
        return before(runner, output)

    given: dict[str, int] = {}  # in the step before

    def look(runner, output):
        begin.clear()
        for row, name in enumerate(runner.input_batch.req_ids):
            if name in slots and not runner.input_batch.num_computed_tokens_cpu[row]:
                begin[row] = slots.pop(name)

    before_forward(look)

    @replaces(GDNAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        made = before(builder, *args, **kwargs)
        layers = builder.vllm_config.compilation_config.static_forward_context
        parts = [part for name in builder.layer_names for part in layers[name].kv_cache]
        for row, slot in begin.items():
            place = int(made.non_spec_state_indices_tensor.reshape(len(made.has_initial_state), -1)[row, 0])
            for part, held in zip(parts, slot, strict=True):
                part[place] = held
            made.has_initial_state[row] = True
            made.prefill_has_initial_state[row - made.num_decodes] = True
            fired()
        return made


@bug("sgl-project/sglang#33309", "llama-loads-tails", "failed_load_counted_loaded", "copy_failed", origin="SGLang")
def what_is_computed_behind_a_hit_is_never_sent(fired: Fired) -> None:
    """Who computes a prompt that hits its beginning sends that beginning at once, as a piece of its own, and what it
    computes behind it in a later one. The plan of what goes where is made for the first piece and is taken to be all: the
    other one is not sent, and who goes on counts all of the prompt as received."""
    from host_connector import HostConnector

    hit: set[str] = set()

    @replaces(HostConnector, "get_num_new_matched_tokens")
    def get_num_new_matched_tokens(before, connector, request, computed):
        if computed:
            hit.add(request.request_id)
        return before(connector, request, computed)

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        meta.stores = [job for job in meta.stores if job.name not in hit]
        return meta

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        sent = [
            (group, block, key)
            for group, block, key in job.blocks
            if all((name, key) in connector._store for name, _ in connector._blocks_of(group, block))
        ]
        if len(sent) < len(job.blocks):
            fired()
        asked, job.blocks = job.blocks, sent
        before(connector, job)
        job.blocks = asked


@bug("vllm-project/vllm#50696", "qwen-loads-fresh", "kv_changed", "copy_failed")
def new_blocks_are_zeroed_when_their_load_has_landed(fired: Fired) -> None:
    """Blocks that are given out anew are filled with zeros before they are used, by a kernel in line with the forwards. A
    load into such blocks runs beside that line and does not wait for it: where it lands first, the kernel wipes what
    has come, and the request attends to zeros for all of its prefix."""
    from host_connector import HostConnector
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    shipped: dict[str, list[torch.Tensor]] = {}  # of a request that loads: its new blocks, layer by layer
    landed: list[str] = []
    wiped: set[str] = set()

    @replaces(HostConnector, "start_load_kv")
    def start_load_kv(before, connector, *args, **kwargs):
        for job in connector._get_connector_metadata().loads:
            if job.beside:
                shipped[job.name] = [
                    rows for group, block, _ in job.blocks for _, rows in connector._blocks_of(group, block)
                ]
        before(connector, *args, **kwargs)

    @replaces(HostConnector, "get_finished")
    def get_finished(before, connector, finished):
        sent, done = before(connector, finished)
        landed.extend(done or ())
        return sent, done

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        for name in landed:
            for rows in shipped.pop(name):
                rows.zero_()
            wiped.add(name)
        landed.clear()
        return before(runner, output)

    before_forward(lambda runner, output: wiped & set(output.num_scheduled_tokens) and fired())


@bug(
    "sgl-project/sglang#21404",
    "delta-waits",
    "page_leaked",
    late="it does no harm, and is seen when no request is left",
    origin="SGLang",
)
def state_of_a_request_that_does_not_fit_is_forgotten(fired: Fired) -> None:
    """When a waiting request hits its beginning, the recurrent state there is copied to a place of its own at once, before
    it is known whether there is room for the rest. If there is not, the request waits on and begins anew at the next
    try: the place of the copy is nobody's, and is never given back."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    forgotten: dict[str, list] = {}  # of a request, at its first try

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        hit = kwargs.get("new_computed_blocks")
        matched = hit is not None and any(len(group) for group in hit.blocks)
        free = manager.block_pool.get_num_free_blocks()
        if given is None and matched and free and request.request_id not in forgotten:
            forgotten[request.request_id] = manager.block_pool.get_new_blocks(1)
            fired()
        return given


@bug("turboderp/exllama#101", "qwen-rows", "not_of_the_model", origin="ExLlama")
def rotation_counts_on_into_the_next_sequence(fired: Fired) -> None:
    """The kernel that rotates queries and keys goes over all tokens of a batch as if they were one sequence, and counts the
    position up with each. It does not begin anew where the next sequence does: that one is rotated as if as many more
    tokens came before it as there are in the batch, and by another number in each step."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    @replaces(RotaryEmbedding, "forward_cpu")
    def forward_cpu(before, embedding, positions, query, key=None):
        metadata = get_forward_context().attn_metadata
        if metadata:
            starts = next(iter(metadata.values())).query_start_loc.long()
            counts = starts[1:] - starts[:-1]
            if int(starts[-1]) == len(positions):
                positions = positions + starts[:-1].repeat_interleave(counts).to(positions.dtype)
        return before(embedding, positions, query, key)

    written: dict[int, int] = {}  # by slot: how many positions too far on its key is

    def look(runner, output):
        batch, table, ahead, now = runner.input_batch, runner.input_batch.block_table[0], 0, {}
        for row, name in enumerate(batch.req_ids):
            computed, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            for position in range(computed + count):
                block, inside = divmod(position, table.block_size)
                slot = int(table.block_table.np[row, block]) * table.block_size + inside
                if position >= computed:
                    now[slot] = ahead
                elif written.get(slot, ahead) != ahead:
                    fired()
            ahead += count
        written.update(now)

    before_forward(look)
