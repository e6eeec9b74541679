"""The two sides of `kernels.py`: one work, the tensors that both read, and a launch of it by either's kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.kernels.ops.plan.reference import WritePlan
from kvcanary.kernels.ops.plan_verify.reference import CanaryBuffer, plan_verify, write_shared
from kvcanary.kernels.ops.violation_log import ViolationLog

DEVICE = torch.device("cuda")
ROW_BYTES = 1024
TAG = 2


@dataclass(slots=True)
class Scenario:
    """One shape, order of slots and KV hash mode: tensors that both sides read, and each side's own to write to."""

    requests: int
    prefix: int
    shuffled: bool
    mode: int
    extend: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Allocate and fill."""
        requests, width = self.requests, self.prefix + self.extend
        count = requests * width
        generator = torch.Generator(DEVICE).manual_seed(7)
        if self.shuffled:
            slots = torch.randperm(count, device=DEVICE, generator=generator) + 1
        else:
            slots = torch.arange(1, count + 1, device=DEVICE)
        slots = slots.view(requests, width)
        table = torch.zeros(requests + 1, (width + 15) // 8 * 8, dtype=torch.int32, device=DEVICE)
        table[1:, :width] = slots.int()
        tokens = torch.randint(0, 150_000, (requests, width), device=DEVICE, generator=generator)
        truth = torch.zeros_like(table)
        truth[1:, :width] = tokens.int()
        kv = torch.randint(0, 256, (count + 1, ROW_BYTES), dtype=torch.uint8, device=DEVICE, generator=generator)
        whole = torch.full((requests,), self.prefix, dtype=torch.int64, device=DEVICE)
        positions = torch.arange(width, device=DEVICE).expand(requests, width)
        self.state = {
            "slots": slots,
            "table": table,
            "truth": truth,
            "tokens": tokens,
            "kv": kv,
            "rows": torch.arange(1, requests + 1, device=DEVICE),
            "prefix_lens": whole,
            "zeros": torch.zeros_like(whole),
            "positions": positions,
            "count": count,
        }

    def part(self, name: str, decode: bool) -> Any:
        """The tokens of the prefix, or those after it, flat."""
        value = self.state[name]
        return (value[:, self.prefix :] if decode else value[:, : self.prefix]).contiguous().view(-1)


class Ours:
    """This project's kernels on a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, state = scenario, scenario.state
        self.canary = torch.zeros(state["count"] + 1, 32, dtype=torch.uint8, device=DEVICE)
        self.log = ViolationLog.allocate(4096, device=DEVICE)
        self.counters = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
        self.lost = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        source = KvSource(tensor=state["kv"], page_size=1, bytes_per_token=ROW_BYTES, read_bytes=ROW_BYTES)
        self.buffer = CanaryBuffer(
            canary=self.canary,
            tag=TAG,
            sources=(source,),
            kv_hash_mode=KvHashMode(scenario.mode),
            violations=self.log,
            slot_counter=self.counters[0],
            kernel_counter=self.counters[1],
        )

    def verify(self) -> Callable[[], None]:
        """Return a launch of plan and verify."""
        state = self.scenario.state
        return lambda: plan_verify(
            req_pool_indices=state["rows"],
            prefix_lens=state["prefix_lens"],
            req_to_token=state["table"],
            window=0,
            full_to_swa=None,
            truth_tokens=state["truth"],
            truth_lens=state["prefix_lens"],
            token_offset=0,
            check_tokens=True,
            buffers=(self.buffer,),
            out_of_range=self.lost,
            backend="triton",
        )

    def write(self, *, decode: bool = False) -> Callable[[], None]:
        """Return a launch of write: the prefixes, or with `decode` the tokens after them."""
        scenario, state = self.scenario, self.scenario.state
        each = scenario.extend if decode else scenario.prefix
        plan = WritePlan.allocate(request_capacity=scenario.requests, device=DEVICE)
        plan.offsets.copy_(torch.arange(scenario.requests + 1, device=DEVICE) * each)
        if decode:
            plan.seed_slots.copy_(state["slots"][:, scenario.prefix - 1])
        plan.num_valid_reqs.fill_(scenario.requests)
        slots, tokens, positions = (scenario.part(name, decode) for name in ("slots", "tokens", "positions"))
        return lambda: write_shared(
            plan=plan,
            input_ids=tokens,
            positions=positions,
            out_cache_loc=slots,
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=True,
            buffers=(self.buffer,),
            backend="triton",
        )

    def rows(self) -> Any:
        """The violation rows so far."""
        return self.log.rows[: int(self.log.write_index)]

    def clear(self) -> None:
        """Forget the violation rows."""
        self.log.clear()


class Published:
    """sglang's kernels on the same scenario."""

    def __init__(self, scenario: Scenario) -> None:
        from sglang.kernels.ops.kv_canary import consts, plan, verify, write

        self.scenario, state = scenario, scenario.state
        self._plan, self._verify, self._write = plan.launch_canary_plan_kernels, verify, write
        self.canary = torch.zeros(state["count"] + 1, 32, dtype=torch.uint8, device=DEVICE)
        self.ring = torch.zeros(4096, 8, dtype=torch.int64, device=DEVICE)
        self.index = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.counters = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
        sources = ()
        if scenario.mode:
            read = 16 if scenario.mode == 1 else ROW_BYTES
            sources = (
                verify.RealKvSource(tensor=state["kv"], page_size=1, num_bytes_per_token=ROW_BYTES, read_bytes=read),
            )
        self.context = verify.VerifyOrWriteContext(
            canary_buf=self.canary,
            kernel_kind=verify.CanaryLaunchTag(TAG),
            violation_ring=self.ring,
            violation_write_index=self.index,
            slot_run_counter=self.counters[0],
            kernel_run_counter=self.counters[1],
            real_kv_sources=sources,
            real_kv_hash_mode=consts.RealKvHashMode(scenario.mode),
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=DEVICE),
        )

    def verify(self) -> Callable[[], None]:
        """Return a launch of plan and verify."""
        scenario, state = self.scenario, self.scenario.state
        capacity = scenario.requests * scenario.prefix + 64
        verify_plan = self._verify.VerifyPlan.allocate(verify_capacity=capacity, device=DEVICE)
        write_plan = self._write.WritePlan.allocate(write_req_capacity=scenario.requests, device=DEVICE)

        def run() -> None:
            self._plan(
                verify_plan_out=verify_plan,
                write_plan_out=write_plan,
                req_pool_indices=state["rows"],
                prefix_lens=state["prefix_lens"],
                extend_seq_lens=state["zeros"],
                req_to_token=state["table"],
                swa_window_size=0,
                full_to_swa_index_mapping=None,
                verify_capacity=capacity,
                req_to_verify_expected_tokens=state["truth"],
                req_to_verify_expected_tokens_valid_lens=state["prefix_lens"],
                kv_token_id_vs_position_offset=0,
            )
            self._verify.launch_canary_verify_kernel(
                context=self.context, plan=verify_plan, check_verify_expected_token=True
            )

        return run

    def write(self, *, decode: bool = False) -> Callable[[], None]:
        """Return a launch of write: the prefixes, or with `decode` the tokens after them."""
        scenario, state = self.scenario, self.scenario.state
        each = scenario.extend if decode else scenario.prefix
        plan = self._write.WritePlan.allocate(write_req_capacity=scenario.requests, device=DEVICE)
        plan.write_offsets.copy_(torch.arange(scenario.requests + 1, device=DEVICE) * each)
        plan.write_seed_slot_indices.fill_(-1)
        if decode:
            plan.write_seed_slot_indices.copy_(state["slots"][:, scenario.prefix - 1])
        plan.write_num_valid_reqs.fill_(scenario.requests)
        slots, tokens, positions = (scenario.part(name, decode) for name in ("slots", "tokens", "positions"))
        return lambda: self._write.launch_canary_write_kernel(
            context=self.context,
            plan=plan,
            input_ids=tokens,
            positions=positions,
            out_cache_loc=slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    def rows(self) -> Any:
        """The violation rows so far."""
        return self.ring[: int(self.index)]

    def clear(self) -> None:
        """Forget the violation rows."""
        self.index.zero_()
