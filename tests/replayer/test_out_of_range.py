"""Each slot that no pool or table has is named once, the one before a window's start included."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan
from kvcanary.recorder.state.forward import Forward
from kvcanary.recorder.state.pools import GroupPool
from kvcanary.recorder.state.requests import RequestTable
from kvcanary.recorder.trace.header import PoolGroup
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.out_of_range import explain_forward
from kvcanary.replayer.run.planning import GroupStep
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.toy_engine import SHAPES, ToyEngine

NUM_SLOTS = 40
WINDOW = 4


def explained(table: np.ndarray, prefix_lens: list[int], *, lut: np.ndarray | None = None):
    """Plan requests 1, 2, .. over `table` with a window and say what looked beyond."""
    bs = len(prefix_lens)
    rows, prefix = np.arange(1, bs + 1, dtype=np.int64), np.array(prefix_lens, np.int64)
    verify_plan = VerifyPlan.allocate(capacity=100, request_capacity=bs)
    verify_plan.slots.fill(1 << 40)  # whatever is read past the valid entries would show
    verify_plan.prev_slots.fill(1 << 40)
    write_plan, counted = WritePlan.allocate(request_capacity=bs), np.zeros(1, np.int64)
    plan(
        req_pool_indices=rows,
        prefix_lens=prefix,
        extend_lens=np.zeros(bs, np.int64),
        req_to_token=table,
        window=WINDOW,
        full_to_swa=lut,
        truth_tokens=None,
        truth_lens=None,
        token_offset=0,
        verify_plan=verify_plan,
        write_plan=write_plan,
        out_of_range=counted,
        backend="reference",
    )
    nothing = np.empty(0, np.int64)
    forward = Forward(
        event=7, forward=3, time_ns=0, runner=0, mode="decode", kv_watched=True, req_pool_indices=rows,
        request_ids=rows + 100, prefix_lens=prefix, extend_lens=np.zeros(bs, np.int64), truth_lens=None,
        sampled_lens=nothing, sampled_tokens=nothing, input_ids=nothing, positions=nothing, out_cache_loc=(nothing,),
        kv_bytes=(),
    )  # fmt: skip
    group = PoolGroup(name="swa", kind="swa", window=WINDOW, num_slots=NUM_SLOTS, lut=-1 if lut is None else 0)
    pool = GroupPool(group, index=0, kv_hash_mode=0)
    step = GroupStep(pool, nothing, write_plan, verify_plan)
    findings = explain_forward(step, forward, table.shape, RequestTable())
    return [(f.kind, f.request_id, f.position, f.slot) for f in findings], findings


def tables(width: int = 12) -> np.ndarray:
    return np.array([[0] * width, range(1, width + 1), range(20, 20 + width)], np.int32)


def test_nothing_beyond_gives_nothing() -> None:
    assert explained(tables(), [9, 5])[0] == []
    assert explained(tables(), [0, 0])[0] == []


@pytest.mark.parametrize("prefixes", [[9, 9], [0, 9], [3, 9]])
def test_the_slot_before_the_window_is_named_once(prefixes: list[int]) -> None:
    table = tables()
    table[2, 4] = NUM_SLOTS  # the window is 5 .. 8
    found, findings = explained(table, prefixes)
    assert found == [("slot_out_of_pool", 102, 4, NUM_SLOTS)]
    assert "the slot before its window" in findings[0].detail


def test_a_predecessor_within_the_window_speaks_for_itself() -> None:
    table = tables()
    table[1, 6] = NUM_SLOTS + 5
    assert explained(table, [9, 9])[0] == [("slot_out_of_pool", 101, 6, NUM_SLOTS + 5)]


def test_both_kinds_in_the_order_of_their_positions() -> None:
    table = tables()
    table[1, 4] = table[1, 5] = table[2, 4] = NUM_SLOTS
    assert [f[1:3] for f in explained(table, [9, 9])[0]] == [(101, 4), (101, 5), (102, 4)]


def test_before_the_window_and_beyond_the_lookup_table() -> None:
    table = tables()
    table[1, 4] = 33
    found, findings = explained(table, [9, 9], lut=np.arange(33, dtype=np.int64))
    assert found == [("swa_lut_out_of_range", 101, 4, -1)]
    assert "the slot before its window" in findings[0].detail


def test_a_whole_trace_in_which_only_the_slot_before_the_window_is_beyond(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["swa"], seed=2, forwards=16)
    window = engine.shape.window
    number, request = next(
        (n, r) for n, event in enumerate(engine.events) for r, p in enumerate(event.ints["prefix_lens"]) if p > window
    )
    ints = engine.events[number].ints
    row, position = int(ints["req_pool_indices"][request]), int(ints["prefix_lens"][request]) - window - 1
    for name, value in {"index": 0, "row": row, "start": position, "count": 1, "slots": 9999}.items():
        ints[f"table_{name}"] = np.append(ints[f"table_{name}"], value)
    with TraceWriter(tmp_path / "t.arrow", engine.header) as writer:
        for event in engine.events:
            assert writer.append(event)
    summary = replay(tmp_path / "t.arrow", settings=ReplaySettings(checks=()), report=tmp_path)
    assert summary.verdict is Verdict.CORRUPT
    assert summary.violations == 0
    assert summary.findings_by_kind == {"swa_lut_out_of_range": 1}
    finding = pq.read_table(tmp_path / "findings.parquet").to_pylist()[0]
    assert (finding["forward"], finding["req_pool_idx"], finding["position"]) == (number, row, position)
