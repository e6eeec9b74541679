"""Where a patch of vLLM looks: before a step's inputs are made, when a request is given blocks, and its recurrent states."""

from collections.abc import Callable
from typing import Any

from bugs import Fired, replaces


def before_forward(look: Callable[[Any, Any], Any]) -> None:
    """Call `look(runner, scheduler output)` right before the inputs of a step are made."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        look(runner, output)
        return before(runner, output, *args, **kwargs)


def when_allocated(look: Callable[[Any, list[int], list[Any]], None]) -> None:
    """Call `look(request, hit, table)` when a request is given blocks: the ids that it hit, and its first group's table."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        if given is not None:
            blocks = kwargs.get("new_computed_blocks")
            hit = [b.block_id for b in (blocks.blocks[0] if blocks is not None else ())]
            look(request, hit, manager.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id, []))
        return given


def when_adopted(stale: set, fired: Fired) -> None:
    """Say that the damage is read when a request is given blocks of `stale`, which has requests or blocks."""
    when_allocated(lambda request, hit, _: stale & {*hit, request.request_id} and fired())


def reads(runner: Any, output: Any, blocks: set[int]) -> bool:
    """Whether a request of a step has one of certain blocks among those that it has computed already."""
    batch = runner.input_batch
    table = batch.block_table[0]
    for row, name in enumerate(batch.req_ids):
        computed = -(-int(batch.num_computed_tokens_cpu[row]) // table.block_size)
        if blocks & set(table.block_table.np[row, :computed].tolist()) and name in output.num_scheduled_tokens:
            return True
    return False


def states_of(runner: Any) -> tuple[int, list[str]]:
    """Return the number of the group with recurrent states, and its layers."""
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if "Mamba" in type(group.kv_cache_spec).__name__:
            return number, group.layer_names
    raise LookupError("no recurrent states")


def parts_of(runner: Any, layers: list[str]) -> list[Any]:
    """Return the tensors of all layers' states, block by block."""
    return [part for name in layers for part in runner.compilation_config.static_forward_context[name].kv_cache]
