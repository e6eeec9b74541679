"""A fourth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import once_written_again


@bug("scouzi1966/maclocal-api#92", "hybrid-page16", "position_off", origin="maclocal-api")
def shared_cursor(fired: Fired) -> None:
    """Requests of different lengths are merged into one batch with one cursor, that of the longest. The tokens that the shorter
    ones decode are rotated for the longest one's place."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode() and int(batch.positions.min()) < int(batch.positions.max()):
            fired()
            batch.positions[:] = batch.positions.max()
        return before(runner, batch, *args, **kwargs)


@bug("NVIDIA/TensorRT-LLM#14423", "llama-page4", "req_to_token", origin="TensorRT-LLM")
def late_unlock_clears_the_new_row(fired: Fired) -> None:
    """The row of a table is given to a new request while the last one's pages are still to be sent. When those are unlocked
    their entries are cleared, in a row that is another's by then."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    left: set[int] = set()
    done: list[int] = []

    @replaces(ReqToTokenPool, "free")
    def free(before, pool, req):
        left.add(int(req.kv.req_pool_idx))
        return before(pool, req)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        for row, end in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            if batch.forward_mode.is_decode() and row in left and end > 14 and not done:
                done.append(1)
                runner.req_to_token_pool.req_to_token[row, 4:8] = 0
                fired()
        return before(runner, batch, *args, **kwargs)


@bug(
    "m0at/rvllm#32",
    "llama-page16",
    "pad_rows_keep_last_blocks",
    "kv_write_damaged",
    "kv_changed",
    origin="rvllm",
    recorded=False,
)
def padding_takes_a_live_slot(fired: Fired) -> None:
    """Rows that pad a batch to its graph's size are filled with the first row's slot. Their K and V are written over those of the
    first row's token."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    padded: list[int] = []

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        padded[:] = [1] if batch.forward_mode.is_decode() and batch.batch_size == 3 else []
        if padded:
            fired()
        return before(runner, batch, *args, **kwargs)

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, info, cache_k, cache_v, *args, **kwargs):
        done = before(pool, layer, info, cache_k, cache_v, *args, **kwargs)
        loc = getattr(info, "loc", info)
        if padded and hasattr(loc, "numel"):
            at = layer.layer_id - pool.start_layer
            pool.k_buffer[at][loc[:1]] = 0.25
            pool.v_buffer[at][loc[:1]] = 0.5
        return done


@bug(
    "tenstorrent/vllm#395",
    "llama-overlap",
    "async_resume_wrong_input",
    "future_map_overrun",
    origin="tt-vllm",
)
def step_built_before_its_tokens(fired: Fired) -> None:
    """A step's inputs are put together before the tokens that the last step has sampled are there. A request is fed its last
    input once more, at the next place."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    last: dict[int, int] = {}

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        rows, decodes = batch.req_pool_indices.tolist(), batch.forward_mode.is_decode()
        fed = batch.input_ids.tolist() if decodes else [-1] * len(rows)
        for at, (row, end) in enumerate(zip(rows, batch.seq_lens.tolist(), strict=True)):
            if decodes and end in (41, 42) and last.get(row, fed[at]) not in (-1, fed[at]):
                fired()
                batch.input_ids[at] = last[row]
            last[row] = fed[at]
        return before(runner, batch, *args, **kwargs)


@bug("NVIDIA/TensorRT-LLM#11879", "llama-page4-small", "page_given_twice", origin="TensorRT-LLM")
def claimed_from_the_wrong_queue(fired: Fired) -> None:
    """A free page is taken out of the queue of the wrong level, and stays in its own. It is given out once more while its owner
    writes it."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(PagedTokenToKVPoolAllocator, "alloc_decode")
    def alloc_decode(before, allocator, seq_lens, seq_lens_cpu, last_loc):
        given = before(allocator, seq_lens, seq_lens_cpu, last_loc)
        begun = [int(slot) for slot in given.tolist() if slot % 4 == 0] if given is not None else []
        if begun and not lost and int(seq_lens_cpu.min()) > 20:
            lost.update(range(begun[0], begun[0] + 4))
            page = torch.tensor([begun[0] // 4], dtype=allocator.free_pages.dtype)
            allocator.free_pages = torch.cat((page, allocator.free_pages))
        return given
