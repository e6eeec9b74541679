"""A twenty-second round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#28374", "llama-abort", "hit_before_written", "prefix_not_computed")
def what_was_sent_away_is_kept_with_a_chunk_that_never_ran(fired: Fired) -> None:
    """A prompt is sent away between two of its chunks, when the next one has its slots and has not run. What it leaves joins the prefix cache like that of any other request, as far
    as its slots reach, and whoever asks for the same prompt reads slots that nobody has written for it."""
    import torch
    from sglang.srt.managers import scheduler

    never: set[int] = set()
    release = scheduler.release_kv_cache

    def keep_it(req, tree_cache, *, checkpoint):
        past, chunk = req.kv.kv_allocated_len, 32
        if not checkpoint and req.kv.holds_kv and not req.output_ids and past % chunk == 0:
            ahead = tree_cache.token_to_kv_pool_allocator.alloc(min(chunk, len(req.origin_input_ids) - past))
            if ahead is not None:
                end = past + len(ahead)
                tree_cache.req_to_token_pool.write((req.kv.req_pool_idx, slice(past, end)), ahead.to(torch.int32))
                req.kv.kv_allocated_len = req.kv.kv_committed_len = end
                never.update(ahead.tolist())
                checkpoint = True
        release(req, tree_cache, checkpoint=checkpoint)

    scheduler.release_kv_cache = keep_it

    def look(runner, batch, rows):
        if any(never & set(prefix) for *_, prefix in rows):
            fired()
        never.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug("vllm-project/vllm#44250", "llama-lora", "identity_not_in_key", origin="vLLM")
def key_of_what_is_kept_has_no_adapter(fired: Fired) -> None:
    """What is kept of a prompt is found by its tokens and by its tenant's salt, and which adapter it was computed with is not in the key. A request with another adapter hits it and
    goes on from K and V that its own weights would not have made."""
    from sglang.srt.managers.schedule_batch import Req

    written: dict[int, object] = {}

    @replaces(Req, "__init__")
    def init(before, req, *args, **kwargs):
        before(req, *args, **kwargs)
        if req.lora_id is not None:
            req.extra_key = req.extra_key.removesuffix(req.lora_id) or None

    def look(runner, batch, rows):
        adapters, at = batch.lora_ids, 0
        for adapter, (*_, slots) in zip(adapters, rows, strict=True):
            if any(written.get(slot, adapter) != adapter for slot in slots):
                fired()
        for adapter, (prefix, end, _) in zip(adapters, rows, strict=True):
            written.update(dict.fromkeys(batch.out_cache_loc[at : at + end - prefix].tolist(), adapter))
            at += end - prefix

    before_forward(look)


@bug("vllm-project/vllm#43990", "llama-page16-retract", "kv_changed", "layer_changed", origin="vLLM")
def clearing_of_a_new_page_runs_on_into_the_next(fired: Fired) -> None:
    """All layers of a page lie behind one another, and a new page is cleared layer by layer, each time by the length of the whole page from where the layer begins. The last layer's
    clearing runs on into the page behind, which is some other request's now and then: of its layers all but the last are nought."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    cleared: set[int] = set()

    def clear(allocator, given):
        size, pool = allocator.page_size, allocator.get_kvcache()
        for first in [slot for slot in given.tolist() if slot % size == 0] if given is not None else ():
            behind = slice(first + size, first + 2 * size)
            for layer in [*pool.k_buffer[:-1], *pool.v_buffer[:-1]]:
                if bool(layer[behind].any()):
                    cleared.update(range(behind.start, behind.stop))
                layer[behind] = 0
        return given

    @replaces(PagedTokenToKVPoolAllocator, "alloc_extend")
    def alloc_extend(before, allocator, *args, **kwargs):
        return clear(allocator, before(allocator, *args, **kwargs))

    @replaces(PagedTokenToKVPoolAllocator, "alloc_decode")
    def alloc_decode(before, allocator, *args, **kwargs):
        return clear(allocator, before(allocator, *args, **kwargs))

    def look(runner, batch, rows):
        cleared.difference_update(batch.out_cache_loc.tolist())
        if any(cleared & set(prefix) for *_, prefix in rows):
            fired()

    before_forward(look)


@bug(
    "NVIDIA/Megatron-LM#5950",
    "llama-small",
    "commit_beyond_allocation",
    origin="Megatron-LM",
    late="a token that goes into the slot kept for padding shows when that is read",
)
def decode_that_gets_no_slot_goes_into_the_one_for_padding(fired: Fired) -> None:
    """A decode is given slots from what is free at the moment, and nobody looks whether that is enough. Where it is not, the row names the slot that is kept for padding, and the
    request's token is written there, as are those of all others that got none."""
    import torch
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    @replaces(BaseTokenToKVPoolAllocator, "check_decode_capacity")
    def check_decode_capacity(before, allocator, **kwargs):
        return True

    @replaces(allocation, "alloc_token_slots")
    def alloc_token_slots(before, tree_cache, count):
        allocator = tree_cache.token_to_kv_pool_allocator
        free = allocator.available_size()
        if count > 3 or free >= count:
            return before(tree_cache, count)
        given = allocator.alloc(free)
        return torch.cat([given, given.new_zeros(count - free)])

    @replaces(TokenToKVPoolAllocator, "free")
    def free(before, allocator, slots):
        before(allocator, slots[slots > 0])

    def look(runner, batch, rows):
        if bool((batch.out_cache_loc == 0).any()):
            fired()

    before_forward(look)


@bug("sgl-project/sglang#38217", "llama-host", "read_before_landed", "failed_load_counted_loaded")
def first_layer_is_read_before_it_has_come_back(fired: Fired) -> None:
    """What comes back from the host comes layer by layer, and each read of a layer is to wait for it. The pool that waits is wrapped by another that is to wait in its place and does
    not: the first layer is read while it is still on its way, and those behind it have come by the time that they are read."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.model_executor.model_runner import ModelRunner

    under_way: list = []

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load(before, host, pool, host_indices, device_indices, layer, *args, **kwargs):
        if layer == 0:
            under_way.append(lambda: before(host, pool, host_indices, device_indices, layer, *args, **kwargs))
        else:
            before(host, pool, host_indices, device_indices, layer, *args, **kwargs)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if under_way:
            fired()
        done = before(runner, batch, *args, **kwargs)
        while under_way:
            under_way.pop(0)()
        return done
