"""The published canary as a rival: its CPU references behind functions that take and fill numpy arrays."""

import warnings
from typing import Any

import numpy as np
import pytest
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.kernels.ops.violation_log import ViolationLog


class Published:
    """sglang's kernels on CPU tensors. Arrays are shared, not copied: results land in the arrays given."""

    def __init__(self) -> None:
        # A missing package must fail, not skip: without it nothing shows that the kernels are right.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from sglang.kernels.ops.kv_canary import consts, plan, verify, write
            from sglang.srt.kv_canary.token_oracle.oracle import HashOracle
            from sglang.srt.kv_canary.token_oracle.oracle_manager import TokenOracleManager
            from sglang.test.kernels.kv_canary import scatter_req_token_ids_reference
        self.torch, self.consts, self._plan, self._verify, self._write = torch, consts, plan, verify, write
        self._scatter = scatter_req_token_ids_reference.scatter_req_token_ids_torch_reference
        self._hash_oracle, self._manager = HashOracle, TokenOracleManager

    def tensor(self, array: Any) -> Any:
        return None if array is None else self.torch.from_numpy(array)

    def verify_plan(self, p: Any) -> Any:
        return self._verify.VerifyPlan(
            verify_slot_indices=self.tensor(p.slots),
            verify_expected_tokens=self.tensor(p.expected_tokens),
            verify_expected_positions=self.tensor(p.expected_positions),
            verify_prev_slot_indices=self.tensor(p.prev_slots),
            verify_num_valid=self.tensor(p.num_valid),
            enable=self.tensor(p.enable),
        )

    def write_plan(self, p: Any) -> Any:
        return self._write.WritePlan(
            write_offsets=self.tensor(p.offsets),
            write_seed_slot_indices=self.tensor(p.seed_slots),
            write_num_valid_reqs=self.tensor(p.num_valid_reqs),
        )

    def plan(self, *, verify_plan: Any, write_plan: Any, **inputs: Any) -> None:
        self._plan.launch_canary_plan_kernels(
            verify_plan_out=self.verify_plan(verify_plan),
            write_plan_out=self.write_plan(write_plan),
            req_pool_indices=self.tensor(inputs["req_pool_indices"]),
            prefix_lens=self.tensor(inputs["prefix_lens"]),
            extend_seq_lens=self.tensor(inputs["extend_lens"]),
            req_to_token=self.tensor(inputs["req_to_token"]),
            swa_window_size=inputs["window"],
            full_to_swa_index_mapping=self.tensor(inputs["full_to_swa"]),
            verify_capacity=len(verify_plan.slots),
            req_to_verify_expected_tokens=self.tensor(inputs["truth_tokens"]),
            req_to_verify_expected_tokens_valid_lens=self.tensor(inputs["truth_lens"]),
            kv_token_id_vs_position_offset=inputs["token_offset"],
        )

    def _context(self, c: Any) -> Any:
        return self._verify.VerifyOrWriteContext(
            canary_buf=self.tensor(c["canary"]),
            kernel_kind=self._verify.CanaryLaunchTag(c["tag"]),
            violation_ring=self.tensor(c["violations"].rows),
            # The published counter is int32, ours int64: it is handed back by `_count`.
            violation_write_index=self.tensor(c["violations"].write_index.astype(np.int32)),
            slot_run_counter=self.tensor(c["slot_counter"]),
            kernel_run_counter=self.tensor(c["kernel_counter"]),
            real_kv_sources=tuple(
                self._verify.RealKvSource(
                    tensor=self.tensor(s.tensor),
                    page_size=s.page_size,
                    num_bytes_per_token=s.bytes_per_token,
                    read_bytes=s.read_bytes,
                )
                for s in c["sources"]
            ),
            real_kv_hash_mode=self.consts.RealKvHashMode(int(c["kv_hash_mode"])),
            enable_chain_position_assert=self.torch.tensor(
                [int(c.get("chain_step_assert", 0))], dtype=self.torch.int32
            ),
        )

    def verify(self, **c: Any) -> None:
        context = self._context(c)
        self._verify.launch_canary_verify_kernel(
            context=context, plan=self.verify_plan(c["plan"]), check_verify_expected_token=c["check_tokens"]
        )
        c["violations"].write_index[0] = int(context.violation_write_index[0])

    def write(self, **c: Any) -> None:
        context = self._context(c)
        self._write.launch_canary_write_kernel(
            context=context,
            plan=self.write_plan(c["plan"]),
            input_ids=self.tensor(c["input_ids"]),
            positions=self.tensor(c["positions"]),
            out_cache_loc=self.tensor(c["out_cache_loc"]),
            enable_write_input_assert=c["expected_tokens"] is not None,
            expected_input_tokens=self.tensor(c["expected_tokens"]),
            expected_input_positions=self.tensor(c["expected_positions"]),
        )
        c["violations"].write_index[0] = int(context.violation_write_index[0])

    def scatter(self, *, flat: Any, offsets: Any, rows: Any, pool: Any) -> None:
        self._scatter(
            flat_in=self.tensor(flat),
            offsets=self.tensor(offsets),
            req_pool_indices=self.tensor(rows),
            pool_out=self.tensor(pool),
        )

    def oracle_tokens(self, *, request_ids: Any, positions: Any, vocab_size: int) -> Any:
        tokens = self._hash_oracle(vocab_size=vocab_size).expected_tokens(
            generalized_req_ids=self.tensor(request_ids), positions=self.tensor(positions)
        )
        return tokens.numpy().astype(np.int64)

    def sampled_tokens(self, *, request_ids: Any, positions: Any, vocab_size: int) -> Any:
        manager = self._manager(oracle=self._hash_oracle(vocab_size=vocab_size))
        tokens = manager.sample_next_tokens(
            generalized_req_ids=self.tensor(request_ids), logits_positions=self.tensor(positions)
        )
        return tokens.numpy().astype(np.int64)


@pytest.fixture(scope="session")
def published() -> Published:
    return Published()


class Cases:
    """What the generators of verify and write cases share."""

    POISON = -0x5A5A5A5A5A5A5A5B

    def log(self, capacity: int, write_index: int = 0) -> ViolationLog:
        log = ViolationLog.allocate(capacity)
        log.rows.fill(self.POISON)
        log.entries.fill(self.POISON)
        log.write_index[0] = write_index
        return log

    def canary(self, rng: np.random.Generator, num_slots: int) -> Any:
        """A buffer of random bytes: stride 32 or more, contiguous or every other row of a larger one."""
        stride = int(rng.choice([32, 32, 40, 64]))
        step = int(rng.choice([1, 1, 2]))
        whole = rng.integers(0, 256, (num_slots * step, stride), dtype=np.uint8)
        return whole[::step]

    def sources(self, rng: np.random.Generator, num_slots: int) -> tuple[KvSource, ...]:
        """Up to four sources: pages, holes at the end of a row, rows apart from one another."""
        made = []
        for _ in range(int(rng.choice([0, 1, 1, 2, 3, 4]))):
            page_size = int(rng.choice([1, 1, 2, 3, 8]))
            bytes_per_token = int(rng.choice([16, 32, 48]))
            read_bytes = int(rng.choice([16, bytes_per_token]))
            row_bytes = page_size * bytes_per_token + int(rng.choice([0, 0, 16, 48]))
            rows = -(-num_slots // page_size) + int(rng.integers(0, 2))
            step = int(rng.choice([1, 1, 2]))
            # A hole of any width at the row's end, while rows stay a multiple of 16 apart.
            whole = rng.integers(0, 256, (rows * step, row_bytes), dtype=np.uint8)
            hole = int(rng.choice([0, 5])) if row_bytes > page_size * bytes_per_token else 0
            made.append(
                KvSource(
                    tensor=whole[::step, : row_bytes - hole],
                    page_size=page_size,
                    bytes_per_token=bytes_per_token,
                    read_bytes=read_bytes,
                )
            )
        return tuple(made)

    def state(self, log: ViolationLog, *arrays: Any) -> list[bytes]:
        """Everything a launch may have changed, but for what only ours has (entries, out_of_range)."""
        return [a.tobytes() for a in (log.rows, log.write_index, *arrays)]


@pytest.fixture(scope="session")
def cases() -> Cases:
    return Cases()
