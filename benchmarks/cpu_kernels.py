"""Time plan, verify and write on the cpu backend against the published canary's CPU references, in one process.

    python benchmarks/cpu_kernels.py [--json] [--entries 32768] [--large 1048576] [--rounds 3]

Results are compared before any ratio is printed; where they differ, none is, and the exit status is 2. It is 1 where
a ratio misses its target. The published package must be installed (CONTRIBUTING.md says how).
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from kvcanary.kernels.constants import KvHashMode, LaunchTag
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan
from kvcanary.kernels.ops.verify.reference import verify
from kvcanary.kernels.ops.violation_log import ViolationLog
from kvcanary.kernels.ops.write.reference import write

TARGETS = {"plan": 100, "verify": 500, "write": 300}
ROW_BYTES = 1024
BATCH = 32

# Every compiled op, run in a fresh process against an empty cache, then against a full one.
FIRST_USE = """
import time
import numba
from kvcanary.kernels import dispatch
from kvcanary.kernels.ops.hash import kv_source
from kvcanary.kernels.ops.oracle import reference as oracle
from kvcanary.kernels.ops.plan import reference as plan
from kvcanary.kernels.ops.scatter import reference as scatter
from kvcanary.kernels.ops.verify import reference as verify
from kvcanary.kernels.ops.write import reference as write
start = time.perf_counter()
for module in (plan, kv_source, verify, write, scatter, oracle):
    for name in dir(module):
        if name.endswith("_loops") and getattr(module, name).__module__ == module.__name__:
            dispatch.select(getattr(module, name), "cpu")
print(time.perf_counter() - start)
"""


class Batch:
    """One forward of `BATCH` requests over `entries` prefix tokens, slots shuffled, then the same tokens written."""

    def __init__(self, entries: int) -> None:
        rng = np.random.default_rng(0)
        self.entries, self.length = entries, entries // BATCH
        slots = (rng.permutation(entries) + 1).astype(np.int32).reshape(BATCH, self.length)
        self.table = np.zeros((BATCH + 1, self.length), np.int32)
        self.table[1:] = slots
        self.truth = rng.integers(0, 100_000, self.table.shape, dtype=np.int32)
        self.rows = np.arange(1, BATCH + 1)
        self.lens = np.full(BATCH, self.length)
        self.input_ids = self.truth[1:].reshape(-1).astype(np.int64)
        self.positions = np.tile(np.arange(self.length), BATCH)
        self.out_cache_loc = slots.reshape(-1).astype(np.int64)
        self.kv = rng.integers(0, 256, (entries + 1, ROW_BYTES), dtype=np.uint8)
        self.sources = [KvSource(tensor=self.kv, page_size=1, bytes_per_token=ROW_BYTES, read_bytes=ROW_BYTES)]


class Ours:
    """The cpu backend's state and launches."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.verify_plan = VerifyPlan.allocate(capacity=batch.entries, request_capacity=BATCH)
        self.write_plan = WritePlan.allocate(request_capacity=BATCH)
        self.from_empty = WritePlan.allocate(request_capacity=BATCH)
        self.from_empty.offsets[:] = np.arange(BATCH + 1) * batch.length
        self.from_empty.num_valid_reqs[0] = BATCH
        self.canary = np.zeros((batch.entries + 1, 32), np.uint8)
        self.violations = ViolationLog.allocate(4096)
        self.counters = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.out_of_range = np.zeros(1, np.int64)

    def plan(self) -> None:
        """Plan a decode step after the whole prefix."""
        plan(
            req_pool_indices=self.batch.rows,
            prefix_lens=self.batch.lens,
            extend_lens=np.ones(BATCH, np.int64),
            req_to_token=self.batch.table,
            window=0,
            full_to_swa=None,
            truth_tokens=self.batch.truth,
            truth_lens=self.batch.lens,
            token_offset=0,
            verify_plan=self.verify_plan,
            write_plan=self.write_plan,
            out_of_range=self.out_of_range,
        )

    def verify(self) -> None:
        """Verify the whole prefix, tokens checked."""
        verify(plan=self.verify_plan, check_tokens=True, **self._launch())

    def write(self) -> None:
        """Write the same prefixes from empty."""
        write(
            plan=self.from_empty,
            input_ids=self.batch.input_ids,
            positions=self.batch.positions,
            out_cache_loc=self.batch.out_cache_loc,
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=False,
            **self._launch(),
        )

    def _launch(self) -> dict[str, Any]:
        return {
            "canary": self.canary,
            "tag": LaunchTag.TAIL_K_FULL,
            "sources": self.batch.sources,
            "kv_hash_mode": KvHashMode.PARTIAL,
            "violations": self.violations,
            "slot_counter": self.counters[0],
            "kernel_counter": self.counters[1],
        }

    def results(self, op: str) -> list[bytes]:
        """Everything that `op` has filled."""
        filled: list[Any]
        v, w = self.verify_plan, self.write_plan
        if op == "plan":
            filled = [v.slots, v.expected_tokens, v.expected_positions, v.prev_slots, v.num_valid, v.enable]
            filled += [w.offsets, w.seed_slots, w.num_valid_reqs]
        else:
            filled = [self.canary, self.violations.rows, self.violations.write_index, *self.counters]
        return [a.tobytes() for a in filled]


class Published:
    """The published canary's state and launches, on CPU tensors of the same input."""

    def __init__(self, batch: Batch) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from sglang.kernels.ops.kv_canary import consts, plan, verify, write
        self.torch, self.ops, self.batch = torch, (plan, verify, write), batch
        self.device = torch.device("cpu")
        self.verify_plan = verify.VerifyPlan.allocate(verify_capacity=batch.entries, device=self.device)
        self.write_plan = write.WritePlan.allocate(write_req_capacity=BATCH, device=self.device)
        self.from_empty = write.WritePlan(
            write_offsets=torch.arange(BATCH + 1) * batch.length,
            write_seed_slot_indices=torch.full((BATCH,), -1),
            write_num_valid_reqs=torch.tensor([BATCH], dtype=torch.int32),
        )
        self.context = verify.VerifyOrWriteContext(
            canary_buf=torch.zeros(batch.entries + 1, 32, dtype=torch.uint8),
            kernel_kind=verify.CanaryLaunchTag.TAIL_K_FULL,
            violation_ring=torch.zeros(4096, 8, dtype=torch.int64),
            violation_write_index=torch.zeros(1, dtype=torch.int32),
            slot_run_counter=torch.zeros(1, dtype=torch.int64),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64),
            real_kv_sources=(
                verify.RealKvSource(
                    tensor=torch.from_numpy(batch.kv),
                    page_size=1,
                    num_bytes_per_token=ROW_BYTES,
                    read_bytes=ROW_BYTES,
                ),
            ),
            real_kv_hash_mode=consts.RealKvHashMode.PARTIAL,
            enable_chain_position_assert=torch.zeros(1, dtype=torch.int32),
        )

    def plan(self) -> None:
        """As `Ours.plan`."""
        t, b = self.torch.from_numpy, self.batch
        self.ops[0].launch_canary_plan_kernels(
            verify_plan_out=self.verify_plan,
            write_plan_out=self.write_plan,
            req_pool_indices=t(b.rows),
            prefix_lens=t(b.lens),
            extend_seq_lens=self.torch.ones(BATCH, dtype=self.torch.int64),
            req_to_token=t(b.table),
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=b.entries,
            req_to_verify_expected_tokens=t(b.truth),
            req_to_verify_expected_tokens_valid_lens=t(b.lens),
            kv_token_id_vs_position_offset=0,
        )

    def verify(self) -> None:
        """As `Ours.verify`."""
        self.ops[1].launch_canary_verify_kernel(
            context=self.context, plan=self.verify_plan, check_verify_expected_token=True
        )

    def write(self) -> None:
        """As `Ours.write`."""
        t, b = self.torch.from_numpy, self.batch
        self.ops[2].launch_canary_write_kernel(
            context=self.context,
            plan=self.from_empty,
            input_ids=t(b.input_ids),
            positions=t(b.positions),
            out_cache_loc=t(b.out_cache_loc),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    def results(self, op: str) -> list[bytes]:
        """As `Ours.results`."""
        v, w, c = self.verify_plan, self.write_plan, self.context
        if op == "plan":
            filled = [v.verify_slot_indices, v.verify_expected_tokens, v.verify_expected_positions]
            filled += [v.verify_prev_slot_indices, v.verify_num_valid, v.enable]
            filled += [w.write_offsets, w.write_seed_slot_indices, w.write_num_valid_reqs]
        else:
            filled = [c.canary_buf, c.violation_ring, c.violation_write_index.to(self.torch.int64)]
            filled += [c.slot_run_counter, c.kernel_run_counter]
        return [a.numpy().tobytes() for a in filled]


def seconds(launch: Callable[[], None]) -> float:
    """Return the wall time of one launch."""
    start = time.perf_counter()
    launch()
    return time.perf_counter() - start


def side_by_side(published: Callable[[], None], ours: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Return both median wall times, taken in turns so that a busy moment of the machine hits both sides."""
    theirs_s, ours_s = [], []
    for _ in range(rounds):
        theirs_s.append(seconds(published))
        ours_s += [seconds(ours) for _ in range(15)]
    return float(np.median(theirs_s)), float(np.median(ours_s))


def equal_results(ours: Ours, published: Published) -> bool:
    """Run every op once on both sides, some records and KV bytes spoilt before verify, and compare byte by byte."""
    for op in ("write", "plan", "verify"):
        if op == "verify":
            ours.canary[5::977, 0] ^= 1
            published.context.canary_buf[5::977, 0] ^= 1
            ours.batch.kv[7::1009, 3] ^= 0xFF  # both sides look at this array
        for side in (ours, published):
            getattr(side, op)()
        if ours.results(op) != published.results(op):
            print(f"{op}: results differ from the published reference; no ratio is given", file=sys.stderr)
            return False
    found = bool(ours.violations.write_index[0])
    if not found:
        print("verify: no violation was found in spoilt records; no ratio is given", file=sys.stderr)
    return found


def first_use_seconds() -> dict[str, float]:
    """Time the compilation of every op from an empty cache folder, and its loading from the full one."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        runs = {}
        for name in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_USE], env=environment, check=True, capture_output=True, text=True
            )
            runs[name] = float(done.stdout)
    return runs


def machine() -> dict[str, str]:
    """Say where and with what the figures came about."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numba", "numpy", "torch", "sglang")},
    }


def main() -> int:
    """Run the benchmark; return 0, 1 (a target missed) or 2 (results differ)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entries", type=int, default=32_768, help="entries against the published references")
    parser.add_argument("--large", type=int, default=1 << 20, help="entries for ours alone")
    parser.add_argument("--rounds", type=int, default=3, help="turns of either side to take the median of")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    batch = Batch(options.entries // BATCH * BATCH)
    ours, published = Ours(batch), Published(batch)
    if not equal_results(ours, published):
        return 2
    report: dict[str, Any] = machine() | {"entries": batch.entries, "ops": {}, "large": {}}
    for op, target in TARGETS.items():
        published_s, ours_s = side_by_side(getattr(published, op), getattr(ours, op), options.rounds)
        report["ops"][op] = {
            "published_ms": published_s * 1e3,
            "ours_ms": ours_s * 1e3,
            "ratio": published_s / ours_s,
            "target": target,
        }
    large = Ours(Batch(options.large // BATCH * BATCH))
    for op in ("write", "plan", "verify"):
        getattr(large, op)()  # the pages of the buffers are touched once before anything is timed
        report["large"][op] = {
            "entries_per_s": large.batch.entries / float(np.median([seconds(getattr(large, op)) for _ in range(5)]))
        }
    report["large_entries"] = large.batch.entries
    report["first_use_s"] = first_use_seconds()
    missed = [op for op, figures in report["ops"].items() if figures["ratio"] < figures["target"]]
    print(json.dumps(report) if options.json else text(report))
    if missed:
        print(f"below target: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def text(report: dict[str, Any]) -> str:
    """Lay the report out for a person."""
    lines = [f"{name:8} {value}" for name, value in report.items() if isinstance(value, str)]
    lines += [
        "",
        f"{report['entries']:,} entries, PARTIAL, {ROW_BYTES}-byte rows, tokens checked; results equal as bytes",
    ]
    lines += [f"{'':8} {'published':>14} {'cpu':>11} {'ratio':>9} {'target':>8}"]
    lines += [
        f"{op:8} {f['published_ms']:11.1f} ms {f['ours_ms']:8.3f} ms {f['ratio']:8.0f}x {f['target']:7}x"
        for op, f in report["ops"].items()
    ]
    lines += ["", f"{report['large_entries']:,} entries, cpu alone"]
    lines += [f"{op:8} {f['entries_per_s'] / 1e6:11.1f} M entries/s" for op, f in report["large"].items()]
    first = report["first_use_s"]
    lines += ["", f"first use, all ops: {first['cold']:.1f} s compiled, {first['warm']:.2f} s from the disk cache"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
