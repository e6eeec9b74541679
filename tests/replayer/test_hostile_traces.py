"""Bent traces: no traceback, never clean, and what is wrong is said."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import Runner, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.commands import run_replay
from ..support.engines.toy_engine import SHAPES, ToyEngine

HOSTILE = (-1, -(1 << 63), (1 << 63) - 1, 1 << 40, 1 << 62)


def bent(tmp_path: Path, change, *, shape: str = "full", extra: tuple[TraceEvent, ...] = ()):
    """Record a clean toy engine with one forward changed; return the trace and that forward's number."""
    engine = ToyEngine(SHAPES[shape], seed=2, forwards=16)
    number = next(n for n in range(8, 16) if len(engine.events[n].ints["input_ids"]) > 2)
    change(engine.events[number])
    path = tmp_path / "t.arrow"
    path.unlink(missing_ok=True)
    with TraceWriter(path, engine.header) as writer:
        for event in (*engine.events, *extra):
            assert writer.append(event)
    return path, number


COLUMNS = [
    "req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "truth_lens", "sampled_lens", "input_ids",
    "positions", "out_cache_loc", "sampled_tokens", "truth_row", "truth_start", "truth_count",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.one_in(3)
def test_any_value_in_any_column(column: str, value: int, tmp_path: Path) -> None:
    def change(event: TraceEvent) -> None:
        values = event.ints[column].copy()
        assert len(values)
        values[-1] = value
        event.ints[column] = values

    path, _ = bent(tmp_path, change)
    result = run_replay(path, "--no-report", "--json")
    summary = json.loads(result.stdout)
    told = (column, value) == ("input_ids", -1) and any(
        words.endswith("input tokens, which are unknown") for words in summary["not_watched"]
    )
    assert result.exit_code in (1, 125) or told or column in ("request_ids", "truth_lens", "sampled_tokens"), summary
    assert result.exit_code != 2


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        ({"table_index": [0], "table_row": [700], "table_start": [0], "table_count": [1], "table_slots": [3]}, "full"),
        ({"table_index": [5], "table_row": [1], "table_start": [0], "table_count": [1], "table_slots": [3]}, "full"),
        ({"table_index": [-1], "table_row": [1], "table_start": [0], "table_count": [1], "table_slots": [3]}, "full"),
        (
            {"table_index": [0], "table_row": [1], "table_start": [1 << 62], "table_count": [1], "table_slots": [3]},
            "full",
        ),
        (
            {"table_index": [0], "table_row": [1], "table_start": [0], "table_count": [1], "table_slots": [1 << 32]},
            "full",
        ),
        ({"lut_index": [5], "lut_start": [0], "lut_count": [1], "lut_slots": [3]}, "swa"),
        ({"lut_index": [0], "lut_start": [9999], "lut_count": [1], "lut_slots": [3]}, "swa"),
        ({"lut_index": [0], "lut_start": [0], "lut_count": [-1], "lut_slots": []}, "swa"),
        ({"kv_change_stream": [0], "kv_change_slot": [5], "kv_change_phase": [7]}, "full"),
        ({"kv_change_stream": [0], "kv_change_slot": [1 << 40], "kv_change_phase": [0]}, "full"),
        ({"kv_change_stream": [9], "kv_change_slot": [5], "kv_change_phase": [0]}, "full"),
    ],
)
def test_changes_that_lie_outside_are_never_passed_over(columns, shape: str, tmp_path: Path) -> None:
    def change(event: TraceEvent) -> None:
        for name, values in columns.items():
            event.ints[name] = np.array(values, np.int64)
        if "kv_change_slot" in columns:
            event.bytes["kv_change_bytes"] = np.zeros(32, np.uint8)

    path, number = bent(tmp_path, change, shape=shape)
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert summary.violations == 0
    assert f"event {number} (forward) contradicts itself" in summary.gaps[0]


@pytest.mark.parametrize(
    ("column", "value"), [("prefix_lens", -3), ("req_pool_indices", 100), ("req_pool_indices", -7)]
)
def test_a_request_outside_its_table_is_a_finding(column: str, value: int, tmp_path: Path) -> None:
    path, number = bent(tmp_path, lambda event: event.ints.update({column: np.full_like(event.ints[column], value)}))
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.CORRUPT
    assert summary.findings_by_kind["entry_out_of_table"]
    assert summary.first_finding["forward"] == number


@pytest.mark.parametrize("labels", ["[]", "3", "null", "[" * 100_000, "not json", '{"a": "\\ud800"}', "\x1b[31mred"])
def test_labels_of_any_kind(labels: str, tmp_path: Path) -> None:
    mark = TraceEvent(kind="mark", scalars={"note": "\x1b[2J[bold]note", "labels": labels})
    request = TraceEvent(kind="request", scalars={"request_id": 100, "name": "[red]\x1b[5m\nx" * 1000})
    path, _ = bent(tmp_path, lambda _: None, extra=(mark, request))
    for options in (("--no-report",), ("--no-report", "--json"), ("--no-report", "--quiet")):
        result = run_replay(path, *options)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    "columns",
    [
        {"slot_group": [0], "slot_start": [1, 2], "slot_count": [1]},
        {"slot_group": [7], "slot_start": [1], "slot_count": [1]},
        {"slot_group": [0], "slot_start": [-1], "slot_count": [1]},
        {"slot_group": [0], "slot_start": [1], "slot_count": [-1]},
    ],
)
def test_a_loss_that_contradicts_itself(columns, tmp_path: Path) -> None:
    loss = TraceEvent(
        kind="loss",
        scalars={"lost_events": 1, "status": "slots_listed"},
        ints={name: np.array(values, np.int64) for name, values in columns.items()},
    )
    path, _ = bent(tmp_path, lambda _: None, extra=(loss,))
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert summary.num_gaps == 1


@pytest.mark.parametrize(
    "copy",
    [(9, 0, 1, 0, 2, 1), (0, 2, 1, 0, 2, 1), (0, 0, 1, 0, 2, 1 << 40), (0, 0, -5, 0, 2, 3), (0, 0, 1, 1, 2, 1)],
)
def test_a_copy_that_leaves_its_tier(copy, tmp_path: Path) -> None:
    names = ("copy_group", "copy_src_tier", "copy_src", "copy_dst_tier", "copy_dst", "copy_count")
    event = TraceEvent(
        kind="kv_copy", ints={name: np.array([value], np.int64) for name, value in zip(names, copy, strict=True)}
    )
    path, _ = bent(tmp_path, lambda _: None, extra=(event,))
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "change",
    [
        lambda h: replace(h, groups=(replace(h.groups[0], kind="swa", window=1 << 62),)),
        lambda h: replace(h, runners=(Runner(token_offset=2),)),
        lambda h: replace(h, groups=h.groups * 300),
        lambda h: replace(h, runners=h.runners * 300),
        lambda h: replace(
            h, groups=(replace(h.groups[0], streams=(replace(h.groups[0].streams[0], bytes_per_token=10**31),)),)
        ),
    ],
)
def test_headers_that_ask_for_too_much_are_refused(change) -> None:
    header = ToyEngine(SHAPES["full"], seed=0, forwards=0).header
    with pytest.raises(ValueError, match=r"expected|does not fit|captures"):
        change(header)


def test_a_header_with_nothing_to_check_is_not_clean(tmp_path: Path) -> None:
    header = TraceHeader(groups=(), tables=())
    path = tmp_path / "t.arrow"
    idle = {"scalars": {"forward": 0, "mode": "idle"}}
    with TraceWriter(path, header) as writer:
        assert writer.append(TraceEvent(kind="forward", **idle))
        row = {"req_pool_indices": np.array([1]), "request_ids": np.array([1]), "prefix_lens": np.array([0])}
        assert writer.append(TraceEvent(kind="forward", **idle, ints={**row, "extend_lens": np.array([0])}))
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert "nothing was checked" in summary.doubts[0]


def test_a_report_that_cannot_be_written_does_not_stop_the_others(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=0, forwards=6)
    for name in ("a", "b"):
        with TraceWriter(tmp_path / f"{name}.arrow", engine.header) as writer:
            for event in engine.events:
                writer.append(event)
    (tmp_path / "a.report" / "violations.parquet").mkdir(parents=True)
    result = run_replay(tmp_path / "a.arrow", tmp_path / "b.arrow", "--quiet")
    assert result.exit_code == 2
    assert "--no-report" in result.output
    assert "CLEAN" in result.stdout
    assert (tmp_path / "b.report" / "summary.json").exists()


def test_a_report_path_need_not_be_utf8(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=0, forwards=6)
    with TraceWriter(tmp_path / "t.arrow", engine.header) as writer:
        for event in engine.events:
            writer.append(event)
    folder = tmp_path / "r\udcff \n"
    folder.mkdir()
    summary = replay(tmp_path / "t.arrow", settings=ReplaySettings(), report=folder)
    assert summary.verdict is Verdict.CLEAN
    assert (folder / "violations.parquet").exists()
    assert json.loads((folder / "summary.json").read_text())["verdict"] == "clean"


def test_a_foreign_header_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="runner"):
        TraceHeader.from_json('{"format_major": 1, "groups": [], "tables": [], "runners": []}')


def test_names_as_long_as_books(tmp_path: Path) -> None:
    """Whoever sends a request chooses its name, which stands in every row of a report that speaks of it."""
    engine = ToyEngine(SHAPES["full"], seed=2, forwards=16)
    event = engine.events[8]
    event.ints["positions"] = event.ints["positions"] + 1
    ids = [int(i) for i in event.ints["request_ids"] if i >= 0]
    names = [
        TraceEvent(
            kind="request", scalars={"request_id": i, "name": "n" * 2_000_000 + str(i), "prompt_len": -1, "room": -1}
        )
        for i in ids
    ]
    path = tmp_path / "t.arrow"
    with TraceWriter(path, engine.header) as writer:
        for told in (*names, *engine.events):
            assert writer.append(told)
    result = run_replay(path)
    assert result.exit_code == 1, result.output
    report = tmp_path / "t.report"
    table = pq.read_table(report / "violations.parquet", columns=["request"])
    shown = {name for name in table["request"].to_pylist() if name.startswith("nnn")}
    assert {name[1000:] for name in shown} <= {f"... (2,000,00{len(str(i))} characters, request {i})" for i in ids}
    assert shown
    assert (report / "summary.json").stat().st_size < 100_000
    assert len(result.output) < 20_000
