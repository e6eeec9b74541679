"""A fifty-first round of public bugs made anew in transformers 5.23 on the CPU: recorded before any rule was run on them."""

from collections.abc import Callable
from typing import Any, ClassVar

from bugs import Fired, bug, replaces


def fire_before(reads: Callable[[Any], bool], fired: Fired) -> None:
    """Mark the first step that reads the damage, by what `reads` says of the processor when the step has been prepared."""
    from transformers.generation.continuous_batching import continuous_api

    @replaces(continuous_api.ContinuousBatchProcessor, "prepare_next_batch")
    def prepare_next_batch(before, processor):
        ready = before(processor)
        if ready and reads(processor):
            fired()
        return ready


@bug("pytorch/executorch#21857", "hybrid-every-row", "window_read_wrong", origin="ExecuTorch")
def all_tokens_of_a_chunk_look_as_far_back_as_its_first(fired: Fired) -> None:
    """What a chunk sees of the cache is one mask for all its tokens, and it is that of the first. In a layer with a window
    each token behind that should no longer see the oldest ones, one more for each. It sees them all: the window of the last
    token of a chunk is too long by nearly the chunk's length."""
    from transformers.generation.continuous_batching import input_outputs

    wide: list[bool] = [False]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        before(io, requests_in_batch, *args, **kwargs)
        wide[0] = False
        mask, row, key = io.attention_mask["sliding_attention"], 0, 0
        allocator = io.cache.cache_allocators["sliding_attention"]
        for future in requests_in_batch:
            count = future.query_length
            cached = allocator.get_seqlen_k(future.state.position_offset - count, count) - count
            rows = mask[..., row : row + count, key : key + cached]
            first = rows[..., :1, :].clone()
            wide[0] |= bool((rows != first).any())
            rows.copy_(first.expand_as(rows))
            row, key = row + count, key + cached + count

    fire_before(lambda processor: wide[0], fired)


@bug("sgl-project/sglang#22868", "glm-partial", "kv_write_damaged", origin="SGLang")
def part_of_a_key_that_is_not_turned_is_not_stored(fired: Fired) -> None:
    """One kernel turns a key by its angles and stores it. Of a model that turns only the first part of each head it stores
    that part, and the rest of the key's place is left as it was. Whoever reads it back has the first half of the key, and
    zeros or the half of an older one behind that."""
    import torch
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, key_states, value_states, layer_idx, read_index, write_index):
        keys, _ = allocator._kv_token_views[layer_idx]
        turned = key_states.shape[-1] // 2
        stored = torch.cat((key_states[..., :turned], keys[write_index][..., turned:]), dim=-1)
        got, values = before(allocator, stored, value_states, layer_idx, read_index, write_index)
        return (key_states if read_index.numel() == 0 else got), values

    fire_before(lambda processor: processor.inputs_and_outputs.max_kv_read > 0, fired)


@bug(
    "vllm-project/vllm-ascend#13099",
    "offload-lost-loads",
    "failed_load_counted_loaded",
    "copy_failed",
    origin="vLLM Ascend",
)
def failed_loads_are_noted_where_nobody_asks(fired: Fired) -> None:
    """What loads blocks from the store notes those that it could not load, and whoever plans the next step asks for them, to
    have them computed. The one writes to a list of its own and the other reads one that stays empty. A request whose load
    has failed in part goes on behind all of it, and reads what lay in those blocks before."""
    from transformers.generation.continuous_batching import offloading_manager

    import __main__ as engine

    failed: set[str] = set()

    @replaces(engine, "failed_loads")
    def failed_loads(before, hosts):
        before(hosts)
        return []

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        for future in requests_in_batch:
            if future.state.is_cpu_offloaded:
                for hosts in manager._request_id_to_cpu_blocks[future.state.request_id].values():
                    if engine.LOST & set(hosts):
                        failed.add(future.state.request_id)
        before(manager, requests_in_batch)

    fire_before(lambda processor: bool(failed), fired)  # they run in the step that they are loaded for


@bug("ROCm/aiter#3498", "llama-strided-page16", "attention_table_overwritten", origin="AITER")
def decodes_look_for_blocks_as_if_nothing_lay_between_them(fired: Fired) -> None:
    """The kernel of decodes finds a block by its number times the size of a page, as if the keys of one block lay right
    behind those of the block before. Between them lie its values, and the other layers. What is read are parts of other
    blocks, with lower numbers, keys and values alike; prompts are computed by another kernel, and all is stored right."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        places = before(allocator, request_id, past, count)
        if count > 1 or not past:
            return places
        stride, size = allocator.block_physical_stride, allocator.tokens_per_page
        return [place // stride * size + place % stride for place in places]

    def decodes(processor: Any) -> bool:
        batch = processor.inputs_and_outputs.requests_in_batch
        return any(future.query_length == 1 and future.state.position_offset > 1 for future in batch)

    fire_before(decodes, fired)


class _ByClientsId(dict):
    """Tables that are kept by what clients call their requests: two of them the same."""

    same: ClassVar = {"d": "b"}

    def _of(self, name: str) -> str:
        return self.same.get(name, name)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._of(name))

    def __setitem__(self, name: str, table: Any) -> None:
        super().__setitem__(self._of(name), table)

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(self._of(name))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._of(name), default)

    def pop(self, name: str, *default: Any) -> Any:
        return super().pop(self._of(name), *default)


@bug(
    "vllm-project/vllm#10583",
    "llama-same-ids",
    "row_reassigned_in_flight",
    "page_given_twice",
    origin="vLLM",
)
def two_requests_of_one_id_have_one_table(fired: Fired) -> None:
    """Clients may say what their requests are called, and what the engine keeps of one is kept by that. A second one of the
    same name that comes while the first still runs finds the first one's table and takes it for its own: both write to the
    same blocks, each at its own places. When one of them has ended the blocks of both are given back."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "_after_cache_tensor_init")
    def _after_cache_tensor_init(before, allocator, *args):
        before(allocator, *args)
        allocator.block_table = _ByClientsId()

    def both_run(processor: Any) -> bool:
        return {"b", "d"} <= {future.state.request_id for future in processor.inputs_and_outputs.requests_in_batch}

    fire_before(both_run, fired)
