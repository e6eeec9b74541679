"""The published canary, stepped on the CPU over an engine's own arrays: its pools, endpoints, plans and references.

Everything that judges here is the published package's: buffer groups, endpoints, launch order, plan, verify and write.
What is ours is the glue that a runner would be: which arrays, which forward, which copy.
"""

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.trace.header import PoolGroup, TraceHeader

from .oracle import expected_inputs, published_oracle
from .step import Step, plan_input
from .sweep import build_sweep_plan

RING_ROWS = 8192
NUM_TAGS = 12


class PublishedCanary:
    """One published canary for each runner of an engine, on the engine's live arrays.

    Args:
        header: says which groups there are.
        req_to_token: the engine's table, `[rows, width] int32`.
        lut: the engine's full-to-SWA table, `[full slots] int64`.
        sources: `(group, stream)` to the pool's bytes, as the recorder takes them.
        kv_hash: "NONE", "PARTIAL" or "ALL".
    """

    def __init__(
        self,
        header: TraceHeader,
        *,
        req_to_token: np.ndarray,
        lut: np.ndarray,
        sources: Mapping[tuple[int, int], KvSource],
        kv_hash: str,
    ) -> None:
        import torch
        from sglang.kernels.ops.kv_canary.consts import RealKvHashMode
        from sglang.srt.environ import envs
        from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode
        from sglang.srt.kv_canary.endpoint import build_endpoints_from_group
        from sglang.srt.kv_canary.state import CanaryDeviceState

        self._envs = envs
        self._header = header
        self._req_to_token = torch.from_numpy(req_to_token)
        self._lut = torch.from_numpy(lut)
        self._sources = sources
        self.verify_totals = {"full": 0, "swa": 0}
        self._oracle = None if header.oracle is None else published_oracle(header.oracle.vocab_size)
        self.config = CanaryConfig(
            mode=CanaryMode.LOG,
            ring_capacity=RING_ROWS,
            sweep_interval=0,
            real_kv_hash_mode=RealKvHashMode[kv_hash],
            enable_write_input_assert=self._oracle is not None,
            enable_verify_token_assert=True,
            stats_print_every_n_steps=0,
        )
        self._states = [
            CanaryDeviceState.allocate(
                config=self.config,
                device=torch.device("cpu"),
                num_tags=NUM_TAGS,
                req_to_token_alloc_size=req_to_token.shape[0],
                max_context_len=req_to_token.shape[1],
            )
            for _ in header.runners
        ]
        for state in self._states:
            state.req_to_verify_expected_tokens.fill_(0x5A5A5A5A)
        self.groups = [self._group(number, group) for number, group in enumerate(header.groups)]
        self.host = [
            {name: np.zeros((group.host_num_slots, 32), np.uint8) for name in _buffers(published)}
            for group, published in zip(header.groups, self.groups, strict=True)
        ]
        self._endpoints = [
            build_endpoints_from_group(group=published, device_state=self._states[group.runner])
            for group, published in zip(header.groups, self.groups, strict=True)
        ]
        self._plans: list[tuple[int, object, object]] = []
        self._expected = None

    def _group(self, number: int, group: PoolGroup):
        """Return one pool group as the published canary holds it, over the engine's own bytes."""
        import torch
        from sglang.kernels.ops.kv_canary.verify import CANARY_SLOT_BYTES, RealKvSource
        from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, PoolKind

        def sources(half: str):
            return tuple(
                RealKvSource(
                    tensor=torch.from_numpy(self._sources[number, stream].tensor),
                    page_size=group.page_size,
                    num_bytes_per_token=described.bytes_per_token,
                    read_bytes=described.bytes_per_token,
                )
                for stream, described in enumerate(group.streams)
                if described.half == half and not described.samples
            )

        def buffer(half: str):
            return torch.zeros(group.num_slots, CANARY_SLOT_BYTES, dtype=torch.uint8) if half in group.halves else None

        return CanaryBufferGroup(
            kind=PoolKind.SWA if group.kind == "swa" else PoolKind.FULL,
            k_head=buffer("K"),
            k_tail=buffer("K"),
            v_head=buffer("V"),
            v_tail=buffer("V"),
            real_kv_sources_k=sources("K"),
            real_kv_sources_v=sources("V"),
            swa_index_lut=self._lut if group.kind == "swa" else None,
            kv_token_id_vs_position_offset=self._header.runners[group.runner].token_offset,
        )

    def before(self, step: Step) -> None:
        """Scatter the truth tokens, plan, and launch the HEAD endpoints of every group of the step's runner."""
        self._plans = []
        if not step.rows.size:
            return
        self._scatter(step)
        offset = self._header.runners[step.runner].token_offset
        self._expected = None if self._oracle is None else expected_inputs(self._oracle, step, token_offset=offset)
        for number in self.groups_of(step.runner):
            verify_plan, write_plan = self._plan(number, step)
            self.verify_totals[self._header.groups[number].kind] += int(verify_plan.verify_num_valid[0])
            self._plans.append((number, verify_plan, write_plan))
            self._launch(number, "HEAD", verify_plan, write_plan, step)

    def after(self, step: Step) -> list[tuple[int, ...]]:
        """Launch the TAIL endpoints; return the forward's violation rows, sorted."""
        for number, verify_plan, write_plan in self._plans:
            self._launch(number, "TAIL", verify_plan, write_plan, step)
        return self._take_rows(step.runner)

    def sweep(self, runner: int, radix_cache) -> list[tuple[int, ...]]:
        """Walk the prefix cache for every group of a runner and launch SWEEP; return the violation rows, sorted."""
        from sglang.srt.kv_canary.runner.kernel_launcher import launch_endpoints_sweep

        for number in self.groups_of(runner):
            plan = build_sweep_plan(radix_cache, window=self._header.groups[number].window, lut=self._lut)
            with self._envs.SGLANG_KV_CANARY_ENABLE_MHA_V.override(True):
                launch_endpoints_sweep(
                    endpoints=self._endpoints[number],
                    group=self.groups[number],
                    verify_plan=plan,
                    violation_log=self._states[runner].violation_log,
                    real_kv_hash_mode=self.config.real_kv_hash_mode,
                )
        return self._take_rows(runner)

    def copy(self, group: int, src: np.ndarray, dst: np.ndarray, *, src_host: bool = False, dst_host: bool = False):
        """Carry the canary records along with a copy of whole slots."""
        for name, buffer in _buffers(self.groups[group]).items():
            tiers = (buffer.numpy(), self.host[group][name])
            tiers[dst_host][dst] = tiers[src_host][src].copy()

    def records(self, group: int, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Return the canary records of slots, buffer by buffer, for another engine."""
        return {name: buffer.numpy()[slots].copy() for name, buffer in _buffers(self.groups[group]).items()}

    def land(self, group: int, slots: np.ndarray, records: dict[str, np.ndarray]) -> None:
        """Put another engine's canary records into slots."""
        for name, buffer in _buffers(self.groups[group]).items():
            buffer.numpy()[slots] = records[name]

    def counters(self) -> tuple[np.ndarray, np.ndarray]:
        """Return kernel and slot counters by launch tag, `[12] int64` each, all runners together."""
        return (
            sum(state.kernel_run_counters.numpy() for state in self._states),
            sum(state.slot_run_counters.numpy() for state in self._states),
        )

    def groups_of(self, runner: int) -> list[int]:
        """Return the numbers of a runner's groups."""
        return [number for number, group in enumerate(self._header.groups) if group.runner == runner]

    def _scatter(self, step: Step) -> None:
        import torch
        from sglang.test.kernels.kv_canary.scatter_req_token_ids_reference import scatter_req_token_ids_torch_reference

        offsets = np.append(0, np.cumsum(step.truth_lens))
        scatter_req_token_ids_torch_reference(
            flat_in=torch.from_numpy(step.truth),
            offsets=torch.from_numpy(offsets),
            req_pool_indices=torch.from_numpy(step.rows),
            pool_out=self._states[step.runner].req_to_verify_expected_tokens,
        )

    def _plan(self, number: int, step: Step):
        import torch
        from sglang.kernels.ops.kv_canary.verify import VerifyPlan
        from sglang.kernels.ops.kv_canary.write import WritePlan
        from sglang.srt.kv_canary.runner.kernel_launcher import invoke_plan

        cpu = torch.device("cpu")
        group = self._header.groups[number]
        verify_plan = VerifyPlan.allocate(verify_capacity=int(step.prefix_lens.sum()) + 1, device=cpu)
        write_plan = WritePlan.allocate(write_req_capacity=step.rows.size, device=cpu)
        invoke_plan(
            plan_input=plan_input(step),
            verify_plan=verify_plan,
            write_plan=write_plan,
            group=self.groups[number],
            req_to_token=self._req_to_token,
            swa_window_size=group.window,
            req_to_verify_expected_tokens=self._states[step.runner].req_to_verify_expected_tokens,
        )
        assert int(verify_plan.enable[0]) == 1
        return verify_plan, write_plan

    def _launch(self, number: int, end: str, verify_plan, write_plan, step: Step) -> None:
        import torch
        from sglang.srt.kv_canary.expected_inputs import ExpectedInputs
        from sglang.srt.kv_canary.runner.kernel_launcher import launch_endpoints_per_forward

        asserted = self._expected is not None
        nothing = ExpectedInputs.allocate(capacity=step.positions.size, device=torch.device("cpu"))

        # The V half is off by default in the published package; a trace is judged whole.
        with self._envs.SGLANG_KV_CANARY_ENABLE_MHA_V.override(True):
            launch_endpoints_per_forward(
                endpoints=self._endpoints[number],
                group=self.groups[number],
                tag_filter=lambda tag: tag.name.startswith(end),
                verify_plan=verify_plan,
                write_plan=write_plan,
                forward_batch=SimpleNamespace(
                    positions=torch.from_numpy(step.positions),
                    out_cache_loc=torch.from_numpy(step.slots),
                    input_ids=torch.from_numpy(step.input_ids),
                ),
                expected_inputs=self._expected if asserted else nothing,
                violation_log=self._states[step.runner].violation_log,
                real_kv_hash_mode=self.config.real_kv_hash_mode,
                enable_write_input_assert=asserted,
                enable_verify_token_assert=True,
            )

    def _take_rows(self, runner: int) -> list[tuple[int, ...]]:
        log = self._states[runner].violation_log
        count = int(log.violation_write_index[0])
        assert count <= RING_ROWS
        rows = sorted(map(tuple, log.violation_ring[:count].tolist()))
        log.violation_write_index.zero_()
        return rows


def _buffers(group) -> dict[str, "object"]:
    """Return the canary buffers that a group has, by name."""
    named = {name: getattr(group, name) for name in ("k_head", "k_tail", "v_head", "v_tail")}
    return {name: buffer for name, buffer in named.items() if buffer is not None}
