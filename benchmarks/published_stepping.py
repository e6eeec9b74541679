"""The rival of stepwise replay: the published canary's kernels (sglang 0.5.23), stepped over a trace's forwards on a GPU.

State is kept by a few torch operations a forward, from columns that went to the GPU batch by batch: changed table
entries, the forward's own slots, sampled tokens, KV bytes. That costs little, and is timed twice, with the canary's
launches and without them, so that a ratio can be given either way. What the launches find lands in one ring.

    python benchmarks/published_stepping.py trace.arrow
"""

import argparse
import json
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kvcanary.kernels.arrays import Int64Array
from kvcanary.recorder.capture.host_arrays import ragged_index
from kvcanary.recorder.trace.header import TraceHeader
from kvcanary.recorder.trace.reader import TraceBatch, TraceGap, TraceReader

# Kinds that change neither tables nor slots, where they carry no table changes.
_PASSED_OVER = frozenset({"forward", "request", "status", "alloc", "free", "evict", "mark", "sample", "segment"})
_COLUMNS = (
    "req_pool_indices",
    "prefix_lens",
    "extend_lens",
    "truth_lens",
    "input_ids",
    "positions",
    "out_cache_loc",
    "kv_bytes",
)
_RING_ROWS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """What stepping gave: `rows` `[n, 8] int64` in no order, and the time with and without the canary's launches."""

    rows: Int64Array
    forwards: int
    entries: int
    seconds: float
    state_seconds: float

    @property
    def launch_seconds(self) -> float:
        """What the canary's own launches took."""
        return self.seconds - self.state_seconds


def step_published(trace: Path, *, device: str = "cuda", kv_hash: str = "partial") -> PublishedRun:
    """Step the published kernels over a trace, after a pass that is not timed, as far as plans of a new size come up.

    Kernels compile anew for each of those.

    Raises:
        ValueError: the trace holds what they cannot be stepped over by this program: copies, transfers, losses, sweeps,
            KV changes, several runners.
    """
    stepping = _Stepping(trace, device, kv_hash, launches=False)
    stepping.run()  # reads the file once, too
    _Stepping(trace, device, kv_hash, launches=True).run(stepping.last_new_size)
    state = _Stepping(trace, device, kv_hash, launches=False).run()
    full = _Stepping(trace, device, kv_hash, launches=True).run()
    return PublishedRun(
        rows=full.rows, forwards=full.forwards, entries=full.entries, seconds=full.seconds, state_seconds=state.seconds
    )


def same_rows(ours: Int64Array, theirs: Int64Array) -> bool:
    """Whether two sets of violation rows `[n, 8]` are the same; the published ring keeps no order."""
    return len(ours) == len(theirs) and np.array_equal(_sorted(ours), _sorted(theirs))


def _sorted(rows: Int64Array) -> Int64Array:
    return rows[np.lexsort(rows.T[::-1])]


class _Stepping:
    def __init__(self, trace: Path, device: str, kv_hash: str, *, launches: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from sglang.kernels.ops.kv_canary import consts, plan, verify, write
        self.torch, self.consts, self.plan, self.verify, self.write = torch, consts, plan, verify, write
        self.trace, self.launches = trace, launches
        self.device = torch.device(device)
        self.mode = {"none": 0, "partial": 1, "all": 2}[kv_hash]
        self.entries = self.forwards = self.last_new_size = 0
        self.sizes: set[tuple[int, int]] = set()

    def run(self, most_forwards: float = math.inf) -> PublishedRun:
        """Step over the trace, up to the batch of events that reaches so many forwards."""
        torch = self.torch
        with TraceReader(self.trace) as reader:
            self._allocate(reader.header)
            on_gpu = self.device.type == "cuda"
            if on_gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            for item in reader.stream():
                if isinstance(item, TraceGap):
                    raise ValueError(item.reason)  # noqa: TRY004 - the file is wrong, not a type
                self._batch(item)
                if self.forwards >= most_forwards:
                    break
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        found = int(self.index.item())
        if found > _RING_ROWS:
            raise ValueError(f"{found:,} violations, the ring holds {_RING_ROWS:,}: rows are lost")
        rows = self.ring[:found].cpu().numpy()
        return PublishedRun(
            rows=rows, forwards=self.forwards, entries=self.entries, seconds=seconds, state_seconds=seconds
        )

    def _allocate(self, header: TraceHeader) -> None:
        torch, verify = self.torch, self.verify
        if len(header.runners) > 1 or header.truth_table is None:
            raise ValueError("expected one runner, and truth tokens")
        self.header = header
        int64 = {"dtype": torch.int64, "device": self.device}
        self.tables = [torch.zeros((t.rows, t.width), dtype=torch.int32, device=self.device) for t in header.tables]
        self.truth = torch.zeros(
            (header.truth_table.rows, header.truth_table.width), dtype=torch.int32, device=self.device
        )
        self.luts = [torch.zeros(length, **int64) for length in header.lut_lens]
        self.ring = torch.zeros((_RING_ROWS, 8), **int64)
        self.index = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.groups = []
        for group in header.groups:
            kv = [
                torch.zeros((group.num_slots, s.capture_bytes), dtype=torch.uint8, device=self.device)
                for s in group.streams
            ]
            contexts = {}
            for end in ("HEAD", "TAIL"):
                for half in group.halves:
                    sources = tuple(
                        verify.RealKvSource(
                            tensor=data,
                            page_size=1,
                            num_bytes_per_token=s.capture_bytes,
                            read_bytes=16 if self.mode == 1 else s.capture_bytes,
                        )
                        for data, s in zip(kv, group.streams, strict=True)
                        if s.half == half
                    )
                    hashed = end == "TAIL" and self.mode and sources
                    contexts[end, half] = verify.VerifyOrWriteContext(
                        canary_buf=torch.zeros((group.num_slots, 32), dtype=torch.uint8, device=self.device),
                        kernel_kind=verify.CanaryLaunchTag[f"{end}_{half}_{group.kind.upper()}"],
                        violation_ring=self.ring,
                        violation_write_index=self.index,
                        slot_run_counter=torch.zeros(1, **int64),
                        kernel_run_counter=torch.zeros(1, **int64),
                        real_kv_sources=sources if hashed else (),
                        real_kv_hash_mode=self.consts.RealKvHashMode(self.mode if hashed else 0),
                        enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=self.device),
                    )
            self.groups.append((group, kv, contexts))
        self.verify_plans: dict[tuple[int, int], Any] = {}
        # As an engine has them: for as many requests as it runs at once, since each capacity compiles the plan kernel anew.
        capacity = max((table.rows - 1 for table in header.tables), default=1)
        self.write_plans = [
            self.write.WritePlan.allocate(write_req_capacity=capacity, device=self.device) for _ in self.groups
        ]
        self.current: dict[int, Any] = {}
        self.checked = False

    def _batch(self, batch: TraceBatch) -> None:
        """Bring a batch's columns to the GPU at once, then step its forwards."""
        kinds = batch.kinds
        strange = set(kinds) - _PASSED_OVER
        if strange or len(batch.values("kv_change_slot")):
            raise ValueError(f"the trace holds {', '.join(sorted(strange)) or 'KV changes'}")
        on = {name: self._up(batch.values(name)) for name in _COLUMNS}
        at = {name: batch.offsets(name).tolist() for name in _COLUMNS}
        table_cells = self._changes(batch, "table", "table_slots", self.tables)
        truth_cells = self._changes(batch, "truth", "truth_tokens", [self.truth])
        lut_cells = self._changes(batch, "lut", "lut_slots", self.luts)
        own, sampled = self._own_cells(batch)
        for number, kind in enumerate(kinds):
            for tensors, (cells, values, bounds) in (
                (self.tables, table_cells),
                ([self.truth], truth_cells),
                (self.luts, lut_cells),
            ):
                for index, tensor in enumerate(tensors):
                    a, b = bounds[index][number], bounds[index][number + 1]
                    if a < b:
                        tensor.view(-1).index_copy_(0, cells[index][a:b], values[index][a:b])
            bs = at["req_pool_indices"][number + 1] - at["req_pool_indices"][number]
            if kind == "forward" and bs:
                self._forward(batch, number, on, at, own, sampled)

    def _up(self, values: Any) -> Any:
        return self.torch.from_numpy(values.copy()).to(self.device)

    def _changes(self, batch: TraceBatch, prefix: str, values: str, tensors: list[Any]) -> Any:
        """Return for each table the flat cells that events change, their values, and each event's bounds."""
        counts, starts = batch.values(f"{prefix}_count"), batch.values(f"{prefix}_start")
        runs = np.diff(batch.offsets(f"{prefix}_count"))
        indices = batch.values(f"{prefix}_index") if prefix != "truth" else np.zeros_like(starts)
        rows = batch.values(f"{prefix}_row") if prefix != "lut" else np.zeros_like(starts)
        of_cell = np.repeat(np.repeat(np.arange(len(runs)), runs), counts)
        table_of_cell = np.repeat(indices, counts)
        data = batch.values(values)
        cells, found, bounds = [], [], []
        for index, tensor in enumerate(tensors):
            width = tensor.shape[1] if tensor.dim() == 2 else 0
            flat = ragged_index(rows * width + starts, counts)
            mine = table_of_cell == index
            kind = np.int32 if tensor.dtype == self.torch.int32 else np.int64
            cells.append(self._up(flat[mine]))
            found.append(self._up(data[mine].astype(kind)))
            bounds.append(np.searchsorted(of_cell[mine], np.arange(len(runs) + 1)).tolist())
        return cells, found, bounds

    def _own_cells(self, batch: TraceBatch) -> Any:
        """Return the flat cells of each forward's own tokens and of what it sampled, in each table and in the truth."""
        offsets = batch.offsets("req_pool_indices")
        forwards = [number for number, kind in enumerate(batch.kinds) if kind == "forward"]
        of = ragged_index(offsets[forwards], np.diff(offsets)[forwards])
        rows = batch.values("req_pool_indices")[of]
        lens = {}
        for name in ("prefix_lens", "extend_lens"):
            begins = batch.offsets(name)
            lens[name] = batch.values(name)[ragged_index(begins[forwards], np.diff(begins)[forwards])]
        prefix, extend = lens["prefix_lens"], np.where(rows == 0, 0, np.maximum(lens["extend_lens"], 0))
        of_forward = np.repeat(forwards, np.diff(offsets)[forwards])
        events = np.arange(batch.num_events + 1)
        own = []
        for table in self.tables:
            cells = ragged_index(rows * table.shape[1] + prefix, extend)
            own.append((self._up(cells), np.searchsorted(np.repeat(of_forward, extend), events).tolist()))
        counts = np.zeros(len(rows), np.int64)
        samplers = np.diff(batch.offsets("sampled_lens"))[forwards] > 0
        values = np.concatenate([batch.event(n).ints("sampled_lens") for n in forwards] or [np.zeros(0, np.int64)])
        counts[np.repeat(samplers, np.diff(offsets)[forwards])] = values
        counts[rows == 0] = 0
        cells = ragged_index(rows * self.truth.shape[1] + prefix + extend, counts)
        tokens = np.concatenate([batch.event(n).ints("sampled_tokens") for n in forwards] or [np.zeros(0, np.int64)])
        bounds = np.searchsorted(np.repeat(of_forward, counts), events).tolist()
        return own, (self._up(cells), self._up(tokens.astype(np.int32)), bounds)

    def _forward(self, batch: TraceBatch, number: int, on: Any, at: Any, own: Any, sampled: Any) -> None:
        rows, prefix, extend, truth_lens, ids, positions, loc, kv = (
            on[name][at[name][number] : at[name][number + 1]] for name in _COLUMNS
        )
        tokens = len(ids)
        self.forwards += 1
        done = 0
        slots_of = []
        for index, (group, _, contexts) in enumerate(self.groups):
            slots = loc[group.table * tokens : (group.table + 1) * tokens]
            if group.lut >= 0:
                slots = self.luts[group.lut][slots]
            slots_of.append(slots)
            capacity = self._capacity(index, group, batch, number)
            if self.launches:
                self._plan(index, group, capacity, rows, prefix, extend, truth_lens)
                for half in group.halves:
                    self._launch(index, contexts["HEAD", half], ids, positions, slots)
        for (_, pools, _), slots in zip(self.groups, slots_of, strict=True):
            for pool in pools:
                size = tokens * pool.shape[1]
                pool.index_copy_(0, slots, kv[done : done + size].view(tokens, pool.shape[1]))
                done += size
        if self.launches:
            for index, ((group, _, contexts), slots) in enumerate(zip(self.groups, slots_of, strict=True)):
                for half in group.halves:
                    self._launch(index, contexts["TAIL", half], ids, positions, slots)
        for index, table in enumerate(self.tables):
            cells, bounds = own[index]
            a, b = bounds[number], bounds[number + 1]
            values = loc[index * tokens : index * tokens + (b - a)].to(self.torch.int32)
            table.view(-1).index_copy_(0, cells[a:b], values)
        cells, values, bounds = sampled
        a, b = bounds[number], bounds[number + 1]
        if a < b:
            self.truth.view(-1).index_copy_(0, cells[a:b], values[a:b])

    def _capacity(self, index: int, group: Any, batch: TraceBatch, number: int) -> int:
        """Return how large a group's verify plan for a forward is, a power of two."""
        lens = batch.event(number).ints("prefix_lens")
        entries = int(np.minimum(lens, group.window or 1 << 40).sum())
        self.entries += entries
        capacity = 1 << max(10, entries.bit_length())
        if (capacity, index) not in self.sizes:
            self.sizes.add((capacity, index))
            self.last_new_size = self.forwards
        return capacity

    def _plan(
        self, index: int, group: Any, capacity: int, rows: Any, prefix: Any, extend: Any, truth_lens: Any
    ) -> None:
        # A plan is used until its group's TAIL, so groups of one size need one each.
        key = (capacity, index)
        if key not in self.verify_plans:
            self.verify_plans[key] = self.verify.VerifyPlan.allocate(verify_capacity=capacity, device=self.device)
        self.current[index] = self.verify_plans[key]
        self.checked = bool(len(truth_lens))
        self.plan.launch_canary_plan_kernels(
            verify_plan_out=self.verify_plans[key],
            write_plan_out=self.write_plans[index],
            req_pool_indices=rows,
            prefix_lens=prefix,
            extend_seq_lens=extend,
            req_to_token=self.tables[group.table],
            swa_window_size=group.window,
            full_to_swa_index_mapping=self.luts[group.lut] if group.lut >= 0 else None,
            verify_capacity=capacity,
            req_to_verify_expected_tokens=self.truth if self.checked else None,
            req_to_verify_expected_tokens_valid_lens=truth_lens if self.checked else None,
            kv_token_id_vs_position_offset=self.header.runners[0].token_offset,
        )

    def _launch(self, index: int, context: Any, ids: Any, positions: Any, slots: Any) -> None:
        self.verify.launch_canary_verify_kernel(
            context=context, plan=self.current[index], check_verify_expected_token=self.checked
        )
        self.write.launch_canary_write_kernel(
            context=context,
            plan=self.write_plans[index],
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )


def main() -> None:
    """Step a trace and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-hash", default="partial", choices=("none", "partial", "all"))
    options = parser.parse_args()
    run = step_published(options.trace, device=options.device, kv_hash=options.kv_hash)
    print(
        json.dumps(
            {
                "forwards": run.forwards,
                "entries": run.entries,
                "violations": len(run.rows),
                "seconds": run.seconds,
                "without_launches": run.state_seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
