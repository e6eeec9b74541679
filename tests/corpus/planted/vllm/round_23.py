"""A twenty-third round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm#27491", "llama", "bad_values_written")
def merged_with_a_part_that_has_nothing_for_it(fired: Fired) -> None:
    """What prompts have computed before is attended to in a part of its own, and merged with what attention to their new tokens gave. A prompt that has nothing in the part, next to one that has, is weighed against
    it by infinity less infinity, which is not a number: the layers above make K and V of that."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    rows: list[bool] = []  # of those in a step: whether it is a prompt that has nothing before, next to one that has

    def look(runner, output):
        batch = runner.input_batch
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        prompts = [output.num_scheduled_tokens[name] > 1 for name in batch.req_ids]
        some = any(done for done, prompt in zip(computed, prompts, strict=True) if prompt)
        rows[:] = [some and prompt and not done for done, prompt in zip(computed, prompts, strict=True)]
        if any(rows):
            fired()

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        result = before(impl, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        starts = attn_metadata.query_start_loc.tolist() if attn_metadata is not None else []
        for nothing, first, end in zip(rows, starts, starts[1:], strict=False):
            if nothing:
                output[first:end] = torch.nan
        return result


@bug(
    "vllm-project/tpu-inference#950",
    "llama",
    "req_to_token",
    "slot_mapping",
    origin="tpu-inference",
)
def new_blocks_are_listed_by_both_who_hold_the_list(fired: Fired) -> None:
    """The list of a request's blocks is handed on and not copied, and who gets it holds the same one as who made it. Both write down a new block: it stands there twice, and all that come after it
    are one further on."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    @replaces(MultiGroupBlockTable, "append_row")
    def append_row(before, tables, blocks, row):
        twice = []
        for table, ids in zip(tables.block_tables, blocks, strict=True):
            room = table.block_table.np.shape[1] - int(table.num_blocks_per_row[row])
            twice.append([*ids, *ids][:room])
        before(tables, tuple(twice), row)

    def look(runner, output):
        batch = runner.input_batch
        table = batch.block_table[0]
        for row, name in enumerate(batch.req_ids):
            end = int(batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens[name]
            blocks = runner.requests[name].block_ids[0][: -(-end // table.block_size)]
            if table.block_table.np[row, : len(blocks)].tolist() != list(blocks):
                fired()

    before_forward(look)


@bug(
    "vllm-project/vllm-gaudi#541",
    "llama-preempt",
    "async_resume_wrong_input",
    origin="vLLM Gaudi",
)
def sampled_tokens_are_kept_twice_and_it_is_resumed_with_them(fired: Fired) -> None:
    """What has been sampled for a request is written down twice in each step. Nobody reads it until it has been preempted: it begins again with each token of its answer two times, as many of them
    as it had."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    right: dict[str, list[int]] = {}

    @replaces(InputBatch, "add_request")
    def add_request(before, batch, request):
        said = list(request.output_token_ids)
        if said and request.prompt_token_ids is not None:
            right[request.req_id] = [*request.prompt_token_ids, *said]
            request.output_token_ids[:] = [token for token in said for _ in range(2)][: len(said)]
        return before(batch, request)

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            first = int(batch.num_computed_tokens_cpu[row])
            fed = batch.token_ids_cpu[row, first : first + output.num_scheduled_tokens[name]].tolist()
            known = right.get(name, [])[first:]
            if any(a != b for a, b in zip(fed, known, strict=False)):
                fired()

    before_forward(look)


@bug("EricLBuehler/mistral.rs#1746", "llama", "attention_seq_len_wrong", origin="mistral.rs")
def prompts_of_a_batch_are_all_as_long_as_the_longest(fired: Fired) -> None:
    """Prompts that are computed together are padded to the longest of them, and how far attention goes is counted after that. It goes as far for each as for the longest, over what stands behind the
    shorter ones' ends."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common_attn_metadata, *args, **kwargs):
        common = common_attn_metadata
        counts = common.query_start_loc.diff()[: common.num_reqs]
        lengths = common.seq_lens.clone()
        prompts = (counts > 1).nonzero().flatten()
        if len(prompts) > 1:
            lengths[prompts] = lengths[prompts].max()
            if bool((lengths != common.seq_lens).any()):
                fired()
        return before(builder, common_prefix_len, common.replace(seq_lens=lengths), *args, **kwargs)


@bug(
    "vllm-project/vllm-omni#6481",
    "sliding",
    "window_read_wrong",
    "attention_table_overwritten",
    origin="vLLM-Omni",
)
def window_that_lies_across_two_edges_has_a_block_too_few(fired: Fired) -> None:
    """Attention is given as many blocks as a window's tokens fill, counted from the last one. Where the window begins inside a block and ends inside another it lies in one more, and the one with its first tokens is
    not among them: the place that it would have is that of no block."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common_attn_metadata, *args, **kwargs):
        common, window, size = common_attn_metadata, builder.window_size, builder.block_size
        if window <= 0 or common.max_query_len > 1:
            return before(builder, common_prefix_len, common, *args, **kwargs)
        table = common.block_table_tensor.clone()
        for row, length in enumerate(common.seq_lens[: common.num_reqs].tolist()):
            first = max(-(-length // size) - -(-window // size), 0)
            if max(length - window, 0) // size < first:
                fired()
            table[row, :first] = 0
        return before(builder, common_prefix_len, common.replace(block_table_tensor=table), *args, **kwargs)


@bug("neuralmagic/vllm#92", "llama-preempt", "shared_page_written", "req_to_token", origin="vLLM (neuralmagic)")
def hit_of_a_request_that_does_not_fit_is_not_taken_back(fired: Fired) -> None:
    """A request is given the blocks that it hits, and then there are none left for the rest of it: it goes on waiting, with those in its list. When it is tried again it gets the same ones once more, behind
    them, and what it computes goes into the first of the prefix."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    kept: dict[str, list] = {}
    twice: set[str] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        name, hit = request.request_id, kwargs.get("new_computed_blocks")
        new_blocks = before(manager, request, *args, **kwargs)
        (single,) = manager.coordinator.single_type_managers
        if new_blocks is None and hit is not None and hit.blocks[0] and name not in kept:
            single.add_local_computed_blocks(name, hit.blocks[0], kwargs["num_new_computed_tokens"], 0)
            kept[name] = single.req_to_blocks.pop(name)
            single.num_cached_block.pop(name)
        elif new_blocks is not None and name in kept:
            single.req_to_blocks[name][:0] = kept.pop(name)
            twice.add(name)
        return new_blocks

    before_forward(lambda runner, output: twice & set(output.num_scheduled_tokens) and fired())
