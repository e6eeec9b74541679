"""SWEEP launches, the health check and the hash oracle's write-input assert, on traces of a real `Recorder`."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.kernels.constants import LaunchTag
from kvcanary.kernels.ops.oracle.reference import oracle_tokens
from kvcanary.recorder.state.forward import read_forward
from kvcanary.recorder.state.history import RunnerActivity
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.health import Health
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.raw_traces import write_in_batches
from .pd_engine import SLOTS, Side

PROMPT = [11, 12, 13, 14]
CACHED = [9, 8, 20, 21]
VOCAB = 1000


def sweep(side: Side, slots=CACHED, *, positions=None, prevs=None):
    positions = np.arange(len(slots)) if positions is None else positions
    prevs = [-1, *slots[:-1]][: len(slots)] if prevs is None else prevs
    side.recorder.sweep(
        groups=0, slots=slots, positions=positions, prev_slots=prevs, locked=np.zeros(len(slots), np.int64)
    )


def judge(side: Side, folder: Path, **settings):
    report = folder / "report"
    report.mkdir()
    summary = replay(side.close(), settings=ReplaySettings(**settings), report=report)
    violations, findings = (
        pq.read_table(report / f"{name}.parquet").to_pylist() for name in ("violations", "findings")
    )
    return summary, violations, findings


def test_a_clean_cache_sweeps_clean_and_is_counted(tmp_path):
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED, truth=PROMPT)
    sweep(side)
    sweep(side, [])
    summary, violations, findings = judge(side, tmp_path)
    assert summary.verdict is Verdict.CLEAN
    assert (violations, findings) == ([], [])
    assert len(summary.kernel_counters) == len(summary.slot_counters) == 12
    assert {tag: n for tag, n in summary.kernel_counters.items() if n and "SWEEP" in tag} == {
        "SWEEP_K_FULL": 2,
        "SWEEP_V_FULL": 2,
    }
    assert summary.slot_counters["SWEEP_K_FULL"] == 4
    assert summary.verified == 8  # the forward had no prefix


def test_a_byte_flipped_in_a_cached_slot_is_seen_by_the_sweep_alone(tmp_path):
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED, truth=PROMPT)
    side.kv[1][20, 5] ^= 0xFF
    side.forward([50, 51], [2, 3], truth=[50, 51], row=2)
    sweep(side)
    summary, violations, _ = judge(side, tmp_path)
    assert summary.violations_by_launch == {"SWEEP_V_FULL": 1}
    (row,) = violations
    assert (row["slot"], row["position"], row["reasons"], row["mode"]) == (20, 2, "VERIFY_KV_HASH", "sweep")
    assert (row["request_id"], row["req_pool_idx"], row["forward"]) == (-1, -1, 1)
    assert (row["writer_forward"], row["writer_request"], row["expected_position"]) == (0, "r7", 2)
    assert summary.requests_hit == {}


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"positions": [0, 1, 3, 3]}, "VERIFY_POSITION"),
        ({"prevs": [-1, 9, 9, 20]}, "VERIFY_CHAIN_HASH"),
        ({"slots": [9, 8, 22, 21]}, "VERIFY_CHAIN_HASH+VERIFY_POSITION"),
    ],
)
def test_a_cache_that_points_elsewhere(change, reasons, tmp_path):
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED, truth=PROMPT)
    sweep(side, **change)
    _, violations, _ = judge(side, tmp_path)
    assert violations[0]["reasons"] == reasons
    assert {row["endpoint"] for row in violations} == {"SWEEP"}


def test_window_halves_that_are_gone_are_passed_over(tmp_path):
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED, truth=PROMPT)
    sweep(side, [0, 8, 20, 0], prevs=[-1, 0, 8, 20])
    summary, violations, findings = judge(side, tmp_path)
    assert (violations, findings) == ([], [])
    assert summary.verdict is Verdict.CLEAN


def test_slots_beyond_the_pool_are_one_finding(tmp_path):
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED, truth=PROMPT)
    sweep(side, [9, SLOTS, -3, 21], prevs=[-1, 9, SLOTS + 5, 20])
    _, _, findings = judge(side, tmp_path)
    (finding,) = [f for f in findings if f["kind"] == "slot_out_of_pool"]
    assert (finding["slot"], finding["position"]) == (SLOTS, 1)


@pytest.mark.parametrize(
    "ints",
    [
        {"sweep_group": [0]},
        {"sweep_group": [9], "sweep_slot": [1], "sweep_position": [0], "sweep_prev": [-1], "sweep_locked": [0]},
    ],
)
def test_a_sweep_that_contradicts_itself_is_left_out(ints, tmp_path):
    side = Side(tmp_path / "s.arrow")
    side.close()
    event = TraceEvent(kind="sweep", ints={name: np.array(values, np.int64) for name, values in ints.items()})
    path = tmp_path / "t.arrow"
    write_in_batches(path, side.header, [event], flush_every=10)
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert "contradicts itself" in summary.gaps[0]


def test_sweeps_that_stop_are_a_finding_once(tmp_path):
    side = Side(tmp_path / "t.arrow", sweep_interval=3)
    side.forward(PROMPT, CACHED, truth=PROMPT)
    sweep(side)
    for n in range(12):
        side.forward([50 + n], [30 + n], start=4 + n, mode="decode", truth=[*PROMPT, *range(50, 51 + n)])
    summary, violations, findings = judge(side, tmp_path)
    assert violations == []
    (finding,) = findings
    assert (finding["kind"], finding["forward"]) == ("launch_missing", 7)
    assert "every 3" in finding["detail"]
    assert summary.verdict is Verdict.CORRUPT


@pytest.mark.parametrize(("again", "stalls"), [(False, 0), (True, 1)])
def test_behind_a_loss_sweeps_are_missed_only_once_one_was_seen(again, stalls, tmp_path):
    """What was lost may be the very hook that tells of them."""
    side = Side(tmp_path / "t.arrow", sweep_interval=3)
    side.forward(PROMPT, CACHED, truth=PROMPT)
    sweep(side)
    side.recorder.lost("the sweeps are no longer recorded")
    for n in range(12):
        side.forward([50 + n], [30 + n], start=4 + n, mode="decode", truth=[*PROMPT, *range(50, 51 + n)])
        if again and n == 2:
            sweep(side)
    _, _, findings = judge(side, tmp_path)
    assert [row["kind"] for row in findings].count("launch_missing") == stalls


def test_a_draft_runner_that_never_runs_is_a_finding(tmp_path):
    from dataclasses import replace

    from kvcanary.recorder.engines.simulated.config import EngineConfig
    from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
    from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
    from kvcanary.recorder.writing.writer import TraceWriter

    source, target = tmp_path / "a.arrow", tmp_path / "b.arrow"
    workload = RandomWorkload(requests=3, prompt_tokens=20, output_tokens=5, max_tokens=60)
    with SimulatedEngine(EngineConfig(eagle=True, page_size=4), workload, source) as engine:
        engine.run()
    with TraceReader(source) as reader, TraceWriter(target, replace(reader.header, trace_id="")) as writer:
        for batch in reader.stream():
            for view in batch:
                if view.kind == "forward" and not view.scalar("runner"):
                    assert writer.append(_copy(view))
    findings = tmp_path / "report"
    findings.mkdir()
    replay(target, settings=ReplaySettings(checks=()), report=findings)
    kinds = pq.read_table(findings / "findings.parquet").to_pylist()
    assert [(row["kind"], row["detail"]) for row in kinds] == [
        ("launch_missing", "runner draft has groups and never ran a forward")
    ]


def _copy(view) -> TraceEvent:
    from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS

    return TraceEvent(
        kind=view.kind,
        time_ns=int(view.scalar("time_ns")),
        scalars={n: view.scalar(n) for n in SCALARS if n not in ("event", "kind", "time_ns")},
        ints={n: np.array(view.ints(n)) for n in INT_LISTS if len(view.ints(n))},
        bytes={n: np.array(view.bytes(n)) for n in BYTE_LISTS if len(view.bytes(n))},
    )


def test_a_launch_that_did_not_happen_is_a_finding_by_tag(tmp_path):
    """The counters are the executor's own, so a whole one never misses a launch: here one is taken away."""
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED, truth=PROMPT)
    side.forward([50], [30], start=4, mode="decode", truth=[*PROMPT, 50])
    with TraceReader(side.close()) as reader:
        health = Health(reader.header, RunnerActivity(len(reader.header.runners)))
        forwards = [view for batch in reader.stream() for view in batch if view.kind == "forward"]
        for view in forwards:
            assert health.forward(read_forward(view, reader.header)) == []
    counters = np.zeros(12, np.int64)
    counters[[LaunchTag.HEAD_K_FULL, LaunchTag.HEAD_V_FULL, LaunchTag.TAIL_K_FULL, LaunchTag.TAIL_V_FULL]] = 4
    assert health.finish(counters) == []
    counters[LaunchTag.TAIL_V_FULL] -= 1
    (finding,) = health.finish(counters)
    assert (finding.kind, finding.forward) == ("launch_missing", 1)
    assert finding.detail == "TAIL_V_FULL was launched 3 times, expected 4"


def test_fail_fast_stops_at_a_sweep(tmp_path):
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED, truth=PROMPT)
    side.kv[0][20, 5] ^= 0xFF
    sweep(side)
    sweep(side)
    summary, violations, _ = judge(side, tmp_path, fail_fast=True)
    assert len(violations) == 1
    assert summary.stopped == "stopped at the first bad event, 2 (sweep) (--fail-fast)"


def oracle(request_id: int, position: int) -> int:
    out = np.empty(1, np.int64)
    ids, positions = np.array([request_id], np.int64), np.array([position], np.int64)
    oracle_tokens(request_ids=ids, positions=positions, vocab_size=VOCAB, out=out)
    return int(out[0])


@pytest.mark.parametrize("room", [-1, 5])
def test_a_decode_that_is_not_fed_the_oracles_token(room, tmp_path):
    """Two bits in one row, HEAD and TAIL, K and V; the KV checks are silent, the chain goes on with what was fed."""
    side = Side(tmp_path / "t.arrow", oracle=VOCAB, room=room)
    whose = room if room >= 0 else 7
    side.forward(PROMPT, CACHED)
    fed = [oracle(whose, 4), oracle(whose, 5) ^ 1, oracle(whose, 6)]
    for n, token in enumerate(fed):
        side.forward([token], [30 + n], start=4 + n, mode="decode")
    summary, violations, _ = judge(side, tmp_path)
    assert summary.violations_by_reason == {"WRITE_TOKEN": 4}
    assert {row["launch"] for row in violations} == {"HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"}
    for row in violations:
        assert (row["forward"], row["slot"], row["position"], row["oracle"]) == (2, 31, 5, "hash")
        assert (row["stored_token"], row["expected_token"]) == (fed[1], oracle(whose, 5))


def test_prompts_and_target_verifies_are_taken_as_fed(tmp_path):
    side = Side(tmp_path / "t.arrow", oracle=VOCAB, prompt_len=4)
    side.forward(PROMPT, CACHED)
    side.forward([1, 2, 3], [30, 31, 32], start=4, mode="target_verify")
    summary, violations, _ = judge(side, tmp_path)
    assert violations == []
    assert summary.verdict is Verdict.CLEAN


def test_without_the_oracle_in_the_header_nothing_is_asserted(tmp_path):
    side = Side(tmp_path / "t.arrow")
    side.forward(PROMPT, CACHED)
    side.forward([999], [30], start=4, mode="decode")
    summary, violations, _ = judge(side, tmp_path)
    assert violations == []
    assert summary.verdict is Verdict.CLEAN


def test_divergence_figures_of_a_sliding_window_pool(tmp_path):
    """Counted against the engine's own tables, forward by forward."""
    from kvcanary.recorder.engines.simulated.config import EngineConfig
    from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
    from kvcanary.recorder.engines.simulated.workloads import RandomWorkload

    expected = []
    config = EngineConfig(shape="swa", page_size=4, num_pages=200, window=12)
    workload = RandomWorkload(requests=12, prompt_tokens=60, output_tokens=20, max_tokens=150, arrival_rate=500.0)
    with SimulatedEngine(config, workload, tmp_path / "t.arrow") as engine:
        told = engine.runner.begin

        def tell(batch):
            told(batch)
            memory = engine.memory
            outside = other = 0
            for row, prefix, extend in zip(batch.rows, batch.prefix_lens, batch.extend_lens, strict=True):
                for slot in memory.req_to_token[row, : prefix + extend].tolist() if row else ():
                    swa = int(memory.lut[slot])
                    outside += swa == 0
                    other += swa not in (0, slot)
            if batch.rows.size:
                expected.append((outside, other))

        engine.runner.begin = tell
        engine.run()
    report = tmp_path / "report"
    report.mkdir()
    summary = replay(tmp_path / "t.arrow", settings=ReplaySettings(), report=report)
    rows = pq.read_table(report / "swa_divergence.parquet").to_pylist()
    assert [(row["out_of_window_tokens"], row["full_idx_divergence"]) for row in rows] == expected
    assert summary.swa_divergence is not None
    figures = summary.swa_divergence["groups"]["swa"]
    assert figures["out_of_window_tokens"]["total"] == sum(outside for outside, _ in expected) > 0
    assert figures["full_idx_divergence"]["last"] == expected[-1][1]
    # The launch counter holds what was verified and what was written.
    assert summary.swa_divergence["verify_full"] == summary.slot_counters["HEAD_K_FULL"] - engine.counters.tokens
    assert 0 < summary.swa_divergence["verify_swa"] < summary.swa_divergence["verify_full"]
