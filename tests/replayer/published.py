"""Steps the published canary's CPU references over a toy engine's own state, in the order of one forward."""

import numpy as np


def published_rows(engine, kv_hash_mode: int) -> list[list[list[int]]]:
    """Return the violation rows of each forward, in launch order; the published package runs, none of ours."""
    import torch
    from sglang.kernels.ops.kv_canary import consts
    from sglang.kernels.ops.kv_canary.plan.api import launch_canary_plan_kernels
    from sglang.kernels.ops.kv_canary.verify import (
        CanaryLaunchTag,
        RealKvSource,
        VerifyOrWriteContext,
        VerifyPlan,
        launch_canary_verify_kernel,
    )
    from sglang.kernels.ops.kv_canary.write import WritePlan, launch_canary_write_kernel

    shape = engine.shape
    kind = "SWA" if shape.window else "FULL"
    buffers = {
        (end, half): torch.zeros(shape.num_slots, 32, dtype=torch.uint8)
        for end in ("HEAD", "TAIL")
        for half in shape.halves
    }
    ring = torch.zeros(4096, 8, dtype=torch.int64)
    result = []
    for shot in engine.snapshots:
        if not len(shot.rows):
            result.append([])
            continue
        index = torch.zeros(1, dtype=torch.int32)
        capacity = int(shot.prefix.sum()) + 1
        verify_plan = VerifyPlan.allocate(verify_capacity=capacity, device=torch.device("cpu"))
        write_plan = WritePlan.allocate(write_req_capacity=len(shot.rows), device=torch.device("cpu"))
        t = torch.from_numpy
        launch_canary_plan_kernels(
            verify_plan_out=verify_plan,
            write_plan_out=write_plan,
            req_pool_indices=t(shot.rows),
            prefix_lens=t(shot.prefix),
            extend_seq_lens=t(shot.extend),
            req_to_token=t(shot.table),
            swa_window_size=shape.window,
            full_to_swa_index_mapping=t(shot.lut) if shape.window else None,
            verify_capacity=capacity,
            req_to_verify_expected_tokens=t(shot.truth),
            req_to_verify_expected_tokens_valid_lens=t(shot.truth_lens),
            kv_token_id_vs_position_offset=0,
        )
        slots = t(shot.lut)[t(shot.slots)] if shape.window else t(shot.slots)
        for end in ("HEAD", "TAIL"):
            for half_number, half in enumerate(shape.halves):
                sources = tuple(
                    RealKvSource(
                        tensor=t(shot.kv[half_number * shape.sources + s]),
                        page_size=1,
                        num_bytes_per_token=shape.capture,
                        read_bytes=shape.capture,
                    )
                    for s in range(shape.sources)
                )
                context = VerifyOrWriteContext(
                    canary_buf=buffers[end, half],
                    kernel_kind=CanaryLaunchTag[f"{end}_{half}_{kind}"],
                    violation_ring=ring,
                    violation_write_index=index,
                    slot_run_counter=torch.zeros(1, dtype=torch.int64),
                    kernel_run_counter=torch.zeros(1, dtype=torch.int64),
                    real_kv_sources=sources if end == "TAIL" else (),
                    real_kv_hash_mode=consts.RealKvHashMode(kv_hash_mode),
                    enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
                )
                launch_canary_verify_kernel(context=context, plan=verify_plan, check_verify_expected_token=True)
                launch_canary_write_kernel(
                    context=context,
                    plan=write_plan,
                    input_ids=t(shot.ids),
                    positions=t(shot.positions),
                    out_cache_loc=slots,
                    enable_write_input_assert=False,
                    expected_input_tokens=None,
                    expected_input_positions=None,
                )
        assert int(index) <= len(ring)
        result.append(np.asarray(ring[: int(index)]).tolist())
    return result
