"""What a trace does not know is left out of the judgement, and said: never a false violation, never a clean bill."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.reader import TraceGap, TraceReader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.toy_engine import SHAPES, ToyEngine
from ..support.raw_traces import write_in_batches


@pytest.mark.parametrize("shape", ["full", "swa", "full_two_sources"])
@pytest.mark.one_in(2)
def test_a_damaged_batch_of_a_clean_trace_gives_no_violation(shape: str, tmp_path: Path) -> None:
    left_out = 0
    for seed in range(6):
        engine = ToyEngine(SHAPES[shape], seed=seed, forwards=30)
        path = tmp_path / f"{seed}.arrow"
        ends = write_in_batches(path, engine.header, engine.events, flush_every=3)
        for batch in (1, 4, 7):
            data = bytearray(path.read_bytes())
            data[(ends[batch - 1] + ends[batch]) // 2] ^= 0x10
            damaged = tmp_path / f"{seed}.{batch}.arrow"
            damaged.write_bytes(data)
            summary = replay(damaged, settings=ReplaySettings(), report=None)
            assert (summary.violations, summary.findings) == (0, 0), (seed, batch, summary.first_violation)
            assert summary.verdict is Verdict.INCONCLUSIVE
            assert summary.num_gaps == 1, summary.gaps
            assert summary.forwards == 27
            left_out += summary.unknown_entries
    assert left_out


@pytest.mark.parametrize("shape", ["full", "swa"])
def test_faults_after_a_gap_are_still_found(shape: str, tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES[shape], seed=3, fault="kv", forwards=60, fault_rate=0.5)
    path = tmp_path / "t.arrow"
    ends = write_in_batches(path, engine.header, engine.events, flush_every=3)
    data = bytearray(path.read_bytes())
    data[(ends[1] + ends[2]) // 2] ^= 0x10
    path.write_bytes(data)
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.CORRUPT
    assert set(summary.violations_by_reason) == {"VERIFY_KV_HASH"}
    assert summary.doubts, "a corrupt trace with a gap must still say that it has one"


def test_a_loss_event_with_its_slots_leaves_only_those_out(tmp_path: Path) -> None:
    """Drop forwards as a recorder under pressure does: their slots are listed, later changes are sent again."""
    for seed in range(5):
        engine = ToyEngine(SHAPES["full"], seed=seed, forwards=40)
        dropped = {10, 11, 12, 25}
        kept, lost = [], []
        for number, event in enumerate(engine.events):
            if number in dropped:
                lost.append(event)
                continue
            if lost:
                slots = np.unique(np.concatenate([e.ints["out_cache_loc"] for e in lost]))
                kept.append(
                    TraceEvent(
                        kind="loss",
                        scalars={"lost_events": len(lost), "note": "queue full", "status": "slots_listed"},
                        ints={
                            "slot_group": np.zeros(len(slots), np.int64),
                            "slot_start": slots.astype(np.int64),
                            "slot_count": np.ones(len(slots), np.int64),
                        },
                    )
                )
                resend(kept[-1], lost)
                lost = []
            kept.append(event)
        path = tmp_path / f"{seed}.arrow"
        write_in_batches(path, engine.header, kept, flush_every=7)
        summary = replay(path, settings=ReplaySettings(), report=None)
        assert (summary.violations, summary.findings) == (0, 0), summary.first_violation
        assert summary.verdict is Verdict.INCONCLUSIVE
        assert summary.lost_events == 4


@pytest.mark.parametrize(("every", "findings"), [(5, 0), (50, 1)])
def test_a_walk_of_the_prefix_cache_may_be_among_what_is_lost(every: int, findings: int, tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=1, forwards=40)
    scalars = {"lost_events": 1, "note": "queue full", "status": "slots_listed"}
    events: list[TraceEvent] = []
    for number, event in enumerate(engine.events, 1):
        events += [event] if number % every else [event, TraceEvent(kind="loss", scalars=scalars)]
    path = tmp_path / "t.arrow"
    write_in_batches(path, replace(engine.header, sweep_interval=3), events, flush_every=7)
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert (summary.violations, summary.findings) == (0, findings), summary.findings_by_kind


def resend(loss: TraceEvent, lost: list[TraceEvent]) -> None:
    """Put the lost forwards' table and truth changes into the loss event, as the next diff would carry them."""
    names = ("table_index", "table_row", "table_start", "table_count", "table_slots")
    names += ("truth_row", "truth_start", "truth_count", "truth_tokens")
    columns = {name: [] for name in names}
    for event in lost:
        ints = event.ints
        for name in names:
            columns[name] += ints[name].tolist()
        at = said = 0
        for r, row in enumerate(ints["req_pool_indices"]):
            prefix, extend = int(ints["prefix_lens"][r]), int(ints["extend_lens"][r])
            for name, value in zip(names[:4], (0, row, prefix, extend), strict=True):
                columns[name].append(int(value))
            columns["table_slots"] += ints["out_cache_loc"][at : at + extend].tolist()
            at += extend
            if ints["sampled_lens"][r]:
                for name, value in zip(names[5:8], (row, prefix + extend, 1), strict=True):
                    columns[name].append(int(value))
                columns["truth_tokens"].append(int(ints["sampled_tokens"][said]))
                said += 1
    loss.ints |= {name: np.array(values, np.int64) for name, values in columns.items()}


def test_an_event_that_contradicts_itself_is_left_out(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=1, forwards=20)
    broken = [
        ("positions", lambda v: v[:-1]),
        ("kv_change_slot", lambda v: np.append(v, 3)),
        ("table_count", lambda v: np.append(v, 5)),
        ("truth_start", lambda v: np.append(v, 5)),
        ("sampled_lens", lambda v: np.full(len(v), -1)),
        ("extend_lens", lambda v: v + 1000),
        ("truth_lens", lambda v: np.append(v, 1)),
        ("sampled_tokens", lambda v: np.append(v, 1)),
        ("out_cache_loc", lambda v: v[1:]),
    ]
    number = next(n for n in range(8, 20) if len(engine.events[n].ints["input_ids"]))
    for name, change in broken:
        good = engine.events[number].ints[name]
        engine.events[number].ints[name] = change(good).astype(np.int64)
        path = tmp_path / f"{name}.arrow"
        write_in_batches(path, engine.header, engine.events, flush_every=100)
        summary = replay(path, settings=ReplaySettings(), report=None)
        engine.events[number].ints[name] = good
        assert summary.verdict is Verdict.INCONCLUSIVE, name
        assert (summary.violations, summary.num_gaps, summary.forwards) == (0, 1, 19), (name, summary.gaps)
        assert f"event {number} (forward) contradicts itself" in summary.gaps[0]


def test_hostile_slots_rows_and_lengths_become_findings(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=2, forwards=12)
    big = 1 << 40
    number = next(n for n in range(4, 12) if len(engine.events[n].ints["input_ids"]))
    event = engine.events[number]
    cases = {
        "out_cache_loc": ("slot_out_of_pool", lambda v: v + big),
        "req_pool_indices": ("entry_out_of_table", lambda v: v + big),
        "prefix_lens": ("entry_out_of_table", lambda v: v + big),
    }
    for name, (kind, change) in cases.items():
        good = event.ints[name]
        event.ints[name] = change(good)
        path = tmp_path / f"{name}.arrow"
        write_in_batches(path, engine.header, engine.events, flush_every=100)
        summary = replay(path, settings=ReplaySettings(), report=None)
        event.ints[name] = good
        assert summary.verdict is Verdict.CORRUPT, name
        assert kind in summary.findings_by_kind, (name, summary.findings_by_kind)
        assert summary.first_finding is not None and summary.first_finding["forward"] == number


def test_events_that_cannot_be_judged_make_a_clean_trace_inconclusive(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=5, forwards=6)
    path = tmp_path / "t.arrow"
    write_in_batches(path, engine.header, [*engine.events, TraceEvent(kind="keyframe")], flush_every=100)
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert "1 keyframe" in summary.doubts[0]


def test_a_trace_without_forwards_is_inconclusive(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=5, forwards=0)
    path = tmp_path / "t.arrow"
    with TraceWriter(path, engine.header):
        pass
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert "no forward" in summary.doubts[0]
    with TraceReader(path) as reader:
        assert not any(isinstance(item, TraceGap) for item in reader.stream())
