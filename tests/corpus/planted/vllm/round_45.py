"""A forty-fifth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import copy

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, reads


@bug(
    "ggml-org/llama.cpp#28056",
    "qwen-uploads",
    "future_map_overrun",
    "slot_mapping",
    "kv_write_lost",
    origin="llama.cpp",
)
def next_chunk_brings_its_slots_while_the_last_one_runs(fired: Fired) -> None:
    """Where the GPU has the host's memory, its kernels read a step's inputs where the host has put them. Nobody waits for a
    chunk that samples nothing: the next one's inputs are put there while its later layers are still to come. These
    write the chunk's keys and values to the next one's slots, and what lay in the chunk's own stays there."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    kept: dict[str, tuple[torch.Tensor, ...]] = {}  # by layer: keys, values and slots of a step that is under way
    under_way = [False]

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, cache, slots):
        if layer.layer_name in kept:
            old_key, old_value, old_slots = kept.pop(layer.layer_name)
            count = min(len(slots), len(old_slots))
            before(impl, layer, old_key, old_value, cache, torch.cat((slots[:count], old_slots[count:])))
        if under_way[0] and ".layers.0." not in layer.layer_name:
            kept[layer.layer_name] = key.clone(), value.clone(), slots.clone()
        else:
            before(impl, layer, key, value, cache, slots)

    def look(runner, output):
        batch = runner.input_batch
        under_way[0] = all(
            batch.num_computed_tokens_cpu[row] + output.num_scheduled_tokens[name] < batch.num_prompt_tokens[row]
            for row, name in enumerate(batch.req_ids)
        )
        if under_way[0]:
            fired()

    before_forward(look)


@bug("vllm-project/vllm#17398", "sliding-eagle-hits", "swa_window_off_by_one", "window_read_wrong")
def last_block_of_a_hit_is_dropped_when_its_window_was_counted(fired: Fired) -> None:
    """Layers with a window look for as many blocks in a row as a window has, and what lies before these is left out of the
    hit. With a draft model the last block of a hit is dropped so that its tokens are computed again, and this is done
    behind the look-up: the window of the next token begins in a block that the hit has left out."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    @replaces(HybridKVCacheCoordinator, "__init__")
    def begin(before, coordinator, config, *args, **kwargs):
        for group in config.kv_cache_groups:  # all of them had their last block dropped then
            group.is_eagle_group = True
        before(coordinator, config, *args, **kwargs)

    @replaces(SlidingWindowManager, "_contiguous_blocks_for_hit")
    def _contiguous_blocks_for_hit(before, window_size, block_size, use_eagle):
        return before(window_size, block_size, False)

    def look(runner, output):
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            if "Sliding" not in type(group.kv_cache_spec).__name__:
                continue
            table, window = runner.input_batch.block_table[number], group.kv_cache_spec.sliding_window
            for row, name in enumerate(runner.input_batch.req_ids):
                computed = int(runner.input_batch.num_computed_tokens_cpu[row])
                first, last = max(0, computed - window + 1) // table.block_size, -(-computed // table.block_size)
                if name in output.num_scheduled_tokens and 0 in table.block_table.np[row, first:last]:
                    fired()

    before_forward(look)


@bug(
    "tenstorrent/tt-metal#55287",
    "hybrid-interleaved",
    "attention_table_overwritten",
    "window_read_wrong",
    origin="TT-Metal",
)
def end_of_the_last_chunk_is_kept_once_for_all_requests(fired: Fired) -> None:
    """Layers with a window keep the end of a prompt's chunk aside, for the first tokens of its next one to attend to. It is
    kept once and not for each request: where the chunks of two prompts take turns, each goes on behind the end of
    the other one's, and layers without a window behind its own."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    tails: dict[int, torch.Tensor] = {}  # by builder: blocks of the end of the last chunk

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        if builder.window_size <= 0 or common.max_query_len == 1:
            return before(builder, common_prefix_len, common, *args, **kwargs)
        size = builder.block_size
        wide = -(-builder.window_size // size)
        right, table = common.block_table_tensor, common.block_table_tensor.clone()
        starts = common.query_start_loc.tolist()
        for row, length in enumerate(common.seq_lens.tolist()):
            count = starts[row + 1] - starts[row]
            first, last = (length - count) // size, length // size
            if count == 1:
                continue
            if first >= wide and (length - count) % size == 0:
                table[row, first - wide : first] = tails[id(builder)]
                if not torch.equal(table[row], right[row]):
                    fired()
            if last >= wide:
                tails[id(builder)] = right[row, last - wide : last].clone()
        common = copy.copy(common)
        common.block_table_tensor = table
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("pytorch/executorch#20346", "hybrid-bursts", "window_read_wrong", "attention_seq_len_wrong", origin="ExecuTorch")
def chunk_fills_the_ring_before_its_first_tokens_have_read_it(fired: Fired) -> None:
    """Layers with a window keep twice as many tokens as that in a ring, and a chunk is written there as a whole before
    it is attended to. A chunk as long as the ring leaves nothing of the one before it: its first tokens attend to what
    is left of their window within the chunk. Layers without a window have all that came before."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        window, size = builder.window_size, builder.block_size
        if window <= 0:
            return before(builder, common_prefix_len, common, *args, **kwargs)
        lengths, table = common.seq_lens.clone(), common.block_table_tensor.clone()
        starts = common.query_start_loc.tolist()
        for row, length in enumerate(lengths.tolist()):
            computed = length - (starts[row + 1] - starts[row])
            gone = max(0, length - 2 * window) // size * size
            if gone > max(0, computed - window + 1):
                lengths[row] -= gone
                table[row, : -(gone // size)] = table[row, gone // size :].clone()
                fired()
        if not torch.equal(lengths, common.seq_lens):
            common = copy.copy(common)
            common.seq_lens, common.block_table_tensor = lengths, table
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("vllm-project/vllm#47466", "qwen-ngram-tails", "async_resume_wrong_input", "next_token_swap")
def last_token_of_a_loaded_prompt_is_taken_for_a_decode(fired: Fired) -> None:
    """All of a prompt but its last token has been computed by another engine and is loaded. With drafts a step of one token
    is taken for a decode, whose input is what the row has sampled last: this request has not sampled anything yet,
    and in place of its last token it is fed the one that the row's last owner ended with."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sampled: dict[int, int] = {}  # by row: the last token

    @replaces(Scheduler, "update_from_output")
    def update_from_output(before, scheduler, output, made):
        for row in made.req_id_to_index.values():
            if row < len(made.sampled_token_ids) and len(made.sampled_token_ids[row]):
                sampled[row] = int(made.sampled_token_ids[row][-1])
        return before(scheduler, output, made)

    @replaces(GPUModelRunner, "_prepare_inputs")
    def _prepare_inputs(before, runner, output, *args, **kwargs):
        batch, right = runner.input_batch, {}
        new = {request.req_id for request in output.scheduled_new_reqs}
        for row, name in enumerate(batch.req_ids):
            last = int(batch.num_prompt_tokens[row]) - 1
            if name in new and 0 < batch.num_computed_tokens_cpu[row] == last:
                right[row, last] = int(batch.token_ids_cpu[row, last])
                batch.token_ids_cpu[row, last] = sampled.get(row, 0)
                fired()
        made = before(runner, output, *args, **kwargs)
        for place, token in right.items():
            batch.token_ids_cpu[place] = token
        return made


@bug(
    "sgl-project/sglang#32564",
    "qwen-loads-leaves",
    "abort_frees_during_transfer",
    "load_landed_elsewhere",
    "kv_changed",
    origin="SGLang",
)
def pages_of_an_aborted_request_are_free_while_they_are_filled(fired: Fired) -> None:
    """A request is aborted while its prefix is on its way to its pages. The pages are given back at once, and nobody tells
    the transfer: it ends some steps later, when another request has the pages and has written its own tokens there,
    and goes on behind those of the aborted one."""
    from host_connector import HostConnector
    from vllm.v1.core.sched.scheduler import Scheduler

    left: set[str] = set()
    landed: set[int] = set()

    @replaces(Scheduler, "_free_request")
    def _free_request(before, scheduler, request, delay_free_blocks=False):
        if delay_free_blocks:
            left.add(request.request_id)
        return before(scheduler, request, delay_free_blocks=False)

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        if job.name in left:
            landed.update(block for _, block, _ in job.blocks)

    @replaces(HostConnector, "get_finished")
    def get_finished(before, connector, finished):
        sent, done = before(connector, finished)
        return sent, {name for name in done or () if name not in left} or None

    before_forward(lambda runner, output: reads(runner, output, landed) and fired())
