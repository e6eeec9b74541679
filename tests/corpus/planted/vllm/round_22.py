"""A twenty-second round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("huggingface/transformers#39408", "sliding", "window_read_wrong", origin="Transformers")
def window_is_given_to_a_kernel_that_counts_the_token_as_well(fired: Fired) -> None:
    """The kernel takes how far back a token may look besides itself, and is given how many tokens the window has. Every token looks at one more than it was trained with, the one that has just left the window."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    windows: set[int] = set()

    @replaces(CPUAttentionBackendImpl, "__init__")
    def init(before, impl, *args, **kwargs):
        before(impl, *args, **kwargs)
        if impl.sliding_window > 0:
            windows.add(impl.sliding_window)
            impl.sliding_window += 1

    def look(runner, output):
        batch = runner.input_batch
        if any(int(batch.num_computed_tokens_cpu[row]) >= min(windows) for row in range(batch.num_reqs)):
            fired()  # behind what is in the cache as far as a window goes

    before_forward(look)


@bug("baidu/vLLM-Kunlun#334", "hybrid", "attention_table_overwritten", origin="vLLM Kunlun")
def decodes_of_the_next_group_keep_the_first_ones_table(fired: Fired) -> None:
    """What attention is told of a step is made for the first group of layers, and copied for the next with its own block table put in. The part for decodes has been taken out of it by then and is copied as it
    is: the decodes of all later groups look through the first one's table."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    builders: list[int] = []
    tables: list = []  # the first group's, in this step

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common_attn_metadata, *args, **kwargs):
        common = common_attn_metadata
        if id(builder) not in builders:
            builders.append(id(builder))
        if builders[0] == id(builder):
            tables[:] = [common.block_table_tensor]
            return before(builder, common_prefix_len, common, *args, **kwargs)
        own, first = common.block_table_tensor, tables[0]
        table, width = own.clone(), min(own.shape[1], first.shape[1])
        lengths = common.seq_lens[: common.num_reqs].tolist()
        for row, count in enumerate(common.query_start_loc.diff()[: common.num_reqs].tolist()):
            if count == 1 and lengths[row] > 1:
                table[row, :width] = first[row, :width]
                back = 0 if builder.window_size < 0 else max(0, lengths[row] - builder.window_size)
                read = slice(back // builder.block_size, -(-lengths[row] // builder.block_size))
                if not torch.equal(table[row, read], own[row, read]):
                    fired()
        return before(builder, common_prefix_len, common.replace(block_table_tensor=table), *args, **kwargs)


@bug("vllm-project/vllm#55766", "recurrent-short", "state_restored_for_other_prefix")
def prompts_end_has_the_shape_of_a_decode(fired: Fired) -> None:
    """Whether a step runs the kernels that were captured for decodes is asked of its shape alone, and where the states lie is written into their buffer for decodes alone. What is left of a prompt behind a hit
    is as short as a decode, and goes on from, and writes to, the states of those who were decoded last."""
    import dataclasses

    import torch
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder

    captured: dict[int, torch.Tensor] = {}

    @replaces(BaseMambaAttentionMetadataBuilder, "_compute_common_metadata")
    def _compute_common_metadata(before, builder, common, *args, **kwargs):
        prompts = bool(common.is_prefilling[: common.num_reqs].any())
        made = before(builder, common, *args, **kwargs)
        if made.num_prefills or not made.num_decodes:
            return made
        count, right = made.num_decodes, made.state_indices_tensor_d
        buffer = captured.setdefault(id(builder), torch.zeros(64, right.shape[1], dtype=right.dtype))
        if not prompts:
            buffer[:count] = right
        elif not torch.equal(buffer[:count], right):
            fired()
            return dataclasses.replace(made, state_indices_tensor_d=buffer[:count].clone())
        return made


@bug("vllm-project/vllm#35157", "delta-preempt", "state_restored_for_other_prefix")
def resumed_request_is_known_by_its_old_column(fired: Fired) -> None:
    """In which column of its table a request's running state lies is kept by the request's name, and it is not forgotten when the request is put back. It comes back with fresh blocks behind a prefix that it hits,
    and what it goes on from is taken from the old column and not from the prefix's."""
    from vllm.v1.worker import mamba_utils

    sizes: list[int] = []

    @replaces(mamba_utils, "preprocess_mamba")
    def preprocess_mamba(before, *args, **kwargs):
        sizes[:] = [args[8].mamba_spec.block_size]
        before(*args, **kwargs)

    @replaces(mamba_utils, "cleanup_mamba_state_idx")
    def cleanup_mamba_state_idx(before, output, columns):
        for name in output.finished_req_ids:
            columns.pop(name, None)
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids and computed and columns[name] != (computed - 1) // sizes[0]:
                fired()


@bug("tenstorrent/tt-metal#49614", "sliding-churn", "kv_changed", "pad_slot_wraps", origin="tt-metal")
def padding_of_a_chunk_comes_round_into_the_window(fired: Fired) -> None:
    """Layers with a window keep so many tokens as a multiple of a tile has, and a position's place is what remains when it is divided by that. The padding of a chunk is stored behind its end like the rest, and where it is
    long it comes round to tokens that are in the window still."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    tile, kept, window = 32, 64, 40
    slots: list[int] = []  # of this step's padding

    def look(runner, output):
        slots.clear()
        batch = runner.input_batch
        table = batch.block_table[0]
        for row, name in enumerate(batch.req_ids):
            count = output.num_scheduled_tokens[name]
            end = int(batch.num_computed_tokens_cpu[row]) + count
            for at in range(end - kept, end - kept + -count % tile * (count > 1)):
                block = int(table.block_table.np[row, at // table.block_size]) if at >= 0 else 0
                if block:
                    slots.append(block * table.block_size + at % table.block_size)
                    if at > end - count - window:  # what the chunk's first token looks at
                        fired()

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, kv_cache, slot_mapping):
        before(impl, layer, key, value, kv_cache, slot_mapping)
        if slots:
            blocks, heads, size, _ = kv_cache.size()
            keys, values = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
            where = slot_mapping.new_tensor(slots)
            rows = (key[:1] * 0).expand(len(slots), *key.shape[1:]).contiguous()
            _custom_ops.cpu_attn_reshape_and_cache(rows, rows, keys, values, where, layer.isa)


@bug(
    "tinygrad/tinygrad#15182",
    "llama-churn",
    "future_map_overrun",
    "async_resume_wrong_input",
    "next_token_swap",
    origin="tinygrad",
)
def each_chunk_is_cut_from_the_prompts_front(fired: Fired) -> None:
    """A long prompt goes through the model in chunks, and which tokens a chunk has is not moved on with where it stands. Later chunks are fed the prompt's first tokens once more, at their own places."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    begun: set[str] = set()  # the requests that have had a chunk

    @replaces(GPUModelRunner, "_prepare_input_ids")
    def _prepare_input_ids(before, runner, output, num_reqs, count, ends):
        before(runner, output, num_reqs, count, ends)
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids[:num_reqs]):
            own = output.num_scheduled_tokens[name]
            at, prompt = int(batch.num_computed_tokens_cpu[row]), int(batch.num_prompt_tokens[row])
            if name in begun and at < prompt and own > 1:
                fired()
                end = int(ends[row])
                runner.input_ids.gpu[end - own : end] = runner.input_ids.gpu.new_tensor(
                    batch.token_ids_cpu[row, :own].tolist()
                )
            begun.add(name)
