"""The faults of ../faults.py on a GPU, on either model runner: the V2 runner is shown to the injector as a V1 one."""

import os
from types import SimpleNamespace
from typing import Any

from draft_faults import install_draft_faults
from faults import Injector, install_state_faults
from layer_faults import VALUE_FAULTS, install_kernel_window, install_value_faults


def install_faults() -> None:
    """Have the fault that the environment asks for injected in this process, if it asks for one."""
    fault = os.environ.get("CONFORMANCE_FAULT")
    if not fault:
        return
    from connector_faults import EXPECTED

    if fault in EXPECTED:
        from faults import mark_all
        from offload_faults import install

        install(fault, mark_all)
        return
    from vllm.v1.worker.gpu import block_table, model_runner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if fault == "kernel_window":
        from faults import mark_all
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
        from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

        install_kernel_window((FlashAttentionImpl, TritonAttentionImpl), mark_all)
        return
    seed = int(os.environ["CONFORMANCE_SEED"])
    if fault.startswith("draft") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from v2_draft_faults import V2DraftInjector, install_v2_draft_faults

        install_v2_draft_faults(V2DraftInjector(fault, seed))
        return
    injector = GpuInjector(fault, seed)
    if fault in VALUE_FAULTS:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
        from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

        install_value_faults(injector, FlashAttentionImpl if fault == "nan_value" else TritonAttentionImpl)
    if fault.startswith("draft"):
        install_draft_faults(injector, GPUModelRunner)
        return
    if fault in ("state_block", "state_begin", "state_copy"):
        install_state_faults(injector, GPUModelRunner)
        return
    preprocess = GPUModelRunner._preprocess

    def faulty_preprocess(runner: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        fed = preprocess(runner, output, *args, **kwargs)
        injector.before(runner, output, fed)
        return fed

    def restoring(execute: Any) -> Any:
        def restoring_execute(runner: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return execute(runner, *args, **kwargs)
            finally:
                injector.after()

        return restoring_execute

    GPUModelRunner._preprocess = faulty_preprocess
    GPUModelRunner.execute_model = restoring(GPUModelRunner.execute_model)

    current: list[Any] = []
    fed_later: list[ShownAsV1] = []  # a step whose positions are made behind its slots
    v2, tables = model_runner.GPUModelRunner, block_table.BlockTables
    prepare, compute = v2.prepare_attn, tables.compute_slot_mappings
    prepare_inputs = DefaultModelState.prepare_inputs

    def noting_prepare(runner: Any, batch: Any) -> Any:  # around the recorder's hook, which sees what comes back
        current[:] = [runner, batch]
        try:
            return prepare(runner, batch)
        finally:
            current.clear()

    def faulty_compute(own: Any, *args: Any, **kwargs: Any) -> Any:
        slots = compute(own, *args, **kwargs)
        if current and not current[1].req_ids[0].startswith("_"):  # else the engine's own warm-up
            shown = ShownAsV1(*current, slots)
            if fault == "position" and shown.real.model_state.rope_state is not None:
                fed_later[:] = [shown]
            else:
                injector.before(shown, shown.output, (shown.batch.input_ids, None, shown.batch.positions))
        return slots

    def faulty_inputs(state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare_inputs(state, *args, **kwargs)
        if fed_later:
            shown = fed_later.pop()
            injector.before(shown, shown.output, (shown.batch.input_ids, None, inputs["positions"]))
        return inputs

    v2.prepare_attn, tables.compute_slot_mappings = noting_prepare, faulty_compute
    v2.execute_model = restoring(v2.execute_model)
    DefaultModelState.prepare_inputs = faulty_inputs


class ShownAsV1:
    """A V2 runner and a step of it, under the names of the V1 runner's."""

    def __init__(self, runner: Any, batch: Any, slots: Any) -> None:
        self.real, self.batch = runner, batch
        self.kv_cache_config, self.vllm_config = runner.kv_cache_config, runner.vllm_config
        self.compilation_config = runner.vllm_config.compilation_config
        own, count = runner.block_tables, len(batch.req_ids)
        held = own.num_blocks.np[:, batch.idx_mapping_np[:count]]
        extend = [int(n) for n in batch.num_scheduled_tokens[:count]]
        self.output = SimpleNamespace(num_scheduled_tokens=dict(zip(batch.req_ids, extend, strict=True)))
        lengths = batch.seq_lens[:count].tolist()
        self.input_batch = SimpleNamespace(
            req_ids=list(batch.req_ids),
            num_reqs=count,
            num_computed_tokens_cpu=[length - new for length, new in zip(lengths, extend, strict=True)],
            block_table=[
                SimpleNamespace(
                    block_table=SimpleNamespace(gpu=own.input_block_tables[group]),
                    block_size=int(own.block_sizes[group]),
                    num_blocks_per_row=held[group],
                    slot_mapping=SimpleNamespace(gpu=slots[group]),
                )
                for group in range(len(own.block_sizes))
            ],
        )


class GpuInjector(Injector):
    """The same with the layout of K and V, and of states, on a GPU."""

    def state_byte(self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int) -> dict | None:
        """Change the first value of the recurrent state that a request goes on from in this step."""
        if not prefix:
            return None
        groups = runner.kv_cache_config.kv_cache_groups
        gid = next(n for n, group in enumerate(groups) if hasattr(group.kv_cache_spec, "mamba_cache_mode"))
        spec = groups[gid].kv_cache_spec
        last = prefix + (0 if isinstance(runner, ShownAsV1) else extend) - 1  # of a V2 runner before the copies
        column = last // spec.block_size if spec.mamba_cache_mode == "align" else 0
        block = int(runner.input_batch.block_table[gid].block_table.gpu[row, column])
        state = runner.compilation_config.static_forward_context[groups[gid].layer_names[0]].kv_cache[0]
        state[(block, *(0,) * (state.dim() - 1))] += 1  # as it lies: it may be transposed
        return {"slot": block}

    def late_layer(self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int) -> dict | None:
        """Change K and V of the model's last layer in all slots of a request's first block, in every value."""
        blocks = runner.input_batch.block_table[0]
        if prefix < blocks.block_size:
            return None
        config = runner.kv_cache_config
        kv = runner.compilation_config.static_forward_context[config.kv_cache_groups[0].layer_names[-1]].kv_cache
        block = int(blocks.block_table.gpu[row, 0])
        both = kv[block] if int(kv.shape[0]) == config.num_blocks else kv[:, block]
        both *= -1
        return {"group": 0, "slot": block * blocks.block_size, "count": blocks.block_size}

    def kv_byte(self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int) -> dict | None:
        """Flip a byte of V of a slot that is read in this step."""
        import torch
        from kvcanary.recorder.engines.vllm.kv import head_views

        group = self._group(runner)
        found = self._live_slot(runner, group, row, prefix)
        if found is None:
            return None
        position, slot = found
        config, size = runner.kv_cache_config, runner.input_batch.block_table[group].block_size
        of = config.kv_cache_groups[group]
        kv = runner.compilation_config.static_forward_context[of.layer_names[0]].kv_cache
        value = head_views(kv, of.kv_cache_spec, config.num_blocks * of.kv_cache_spec.block_size)["V"]
        value[slot // size, slot % size].view(torch.uint8)[self._rng.randrange(16)] ^= 0xFF
        return {"group": group, "position": position, "slot": slot, "count": 1}
