"""What the verdict says that it does not speak for: the same from every executor, and nothing is left out in silence."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from kvcanary.kernels.arrays import Int64Array
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.runner import ForwardRunner as SimulatedRunner
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.header import (
    KvStream,
    NotWatched,
    PoolGroup,
    Ranks,
    Runner,
    StatePool,
    StateTable,
    TraceHeader,
)
from kvcanary.recorder.trace.schema import IDENTITY_KINDS
from kvcanary.replayer.checks import CHECK_NAMES, Covered
from kvcanary.replayer.cli.printer import ranks_there
from kvcanary.replayer.cli.screen import one_line, show
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.coverage import Watched, coverage, no_figures, no_samples, not_watched
from kvcanary.replayer.run.replay import ReplaySettings, replay
from rich.console import Console

from ..support.engines.ring import Ring
from ..support.places import DATA

WORKLOAD = RandomWorkload(seed=1, requests=6)
AFTERWARDS = "what changed in a slot after it was looked at last"
TOLD = np.full(1 + len(IDENTITY_KINDS), 7)  # requests, and how many of them declared what
SETTINGS = ReplaySettings().to_json() | {"kv_hash": "partial"}


def _group(name: str = "full", *, layers: int = 4, runner: int = 0, captured: int = 32) -> PoolGroup:
    streams = tuple(KvStream(half=half, bytes_per_token=64, capture_bytes=captured) for half in "KV")
    return PoolGroup(name=name, num_slots=64, streams=streams, num_layers=layers, runner=runner)


def _header(**changes: object) -> TraceHeader:
    header = TraceHeader(
        groups=(_group(),), tables=(StateTable(rows=4, width=16),), truth_table=StateTable(rows=4, width=16)
    )
    return dataclasses.replace(header, **changes)  # type: ignore[arg-type]  # fields of a header


def _rows(
    header: TraceHeader, *, seen: int = 10, settings: dict[str, object] | None = None, samples: Int64Array | None = None
) -> list[Watched]:
    figures = no_figures(header)
    figures[:] = [10, seen, seen, seen, seen, seen, 100, 0, seen, 10, seen]
    return coverage(
        header,
        figures,
        no_samples(header) if samples is None else samples,
        TOLD,
        recorded=10,
        judged=10,
        entries_read=50,
        unknown_entries=0,
        settings=SETTINGS if settings is None else settings,
    )


def test_layers_bytes_and_history_are_named() -> None:
    words = not_watched(_rows(_header()))
    assert words == [
        "layers 1-3",
        "96 of a slot's 128 bytes (--kv-hash partial)",
        "who held a slot (no slot history)",
        AFTERWARDS,
    ]


def _sampled(*halves: str, dtype: str = "float16") -> TraceHeader:
    group = _group()
    layers = tuple(range(4))
    sampling = [
        KvStream(half=half, layers=layers, bytes_per_token=64, capture_bytes=16, seed=0, dtype=dtype) for half in halves
    ]
    return _header(groups=(dataclasses.replace(group, streams=(*group.streams, *sampling)),))


def test_samples_count_as_far_as_they_have_reached() -> None:
    header = _sampled("K", "V")
    samples = no_samples(header)
    assert samples.shape == (2 * 4 * 4,)
    samples[:] = 3
    rows = {row.what: row for row in _rows(header, samples=samples)}
    whole = not_watched(_rows(header, samples=samples))
    assert whole[0] == "448 of a slot's 512 bytes, others in each slot (--kv-hash partial)" and len(whole) == 3
    assert (rows["layers"].watched, rows["samples"].share, rows["values"].watched) == (4, 1.0, 8)
    samples[4:8] = samples[16:28] = 0  # layer 1 of K, layers 0 to 2 of V
    said = not_watched(_rows(header, samples=samples))
    assert said[:2] == [
        "layers 1; V of layers 2",
        "448 of a slot's 512 bytes, others in each slot (--kv-hash partial)",
    ]
    assert said[2] == "16 of 32 pieces of K and V of all layers, in any slot"
    said = not_watched(_rows(_sampled("V", dtype="bytes"), samples=samples[:16] + 1))
    assert said[0] == "K of layers 1-3" and "NaN, infinity and zeros in K and V" in said


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (StatePool(name="mamba", num_slots=8, num_layers=1, hashed_bytes=16), []),
        (StatePool(name="mamba", num_slots=8, num_layers=5, hashed_bytes=16), ["recurrent state of every layer but 0"]),
        (StatePool(name="mamba", num_slots=8, num_layers=5), ["recurrent state of every layer"]),
        (
            StatePool(name="mamba", num_slots=8, layer=2, num_layers=1, hashed_bytes=16, part_bytes=(8, 40)),
            ["24 of 48 bytes of recurrent state in layer 2"],
        ),
        (
            StatePool(name="mamba", num_slots=8, num_layers=5, hashed_bytes=16, part_bytes=(8, 40)),
            ["recurrent state of every layer but 0; 24 of 48 bytes of recurrent state in layer 0"],
        ),
    ],
)
def test_layers_whose_recurrent_state_is_not_read_are_named(pool: StatePool, words: list[str]) -> None:
    assert [word for word in not_watched(_rows(_header(states=(pool,)))) if "state" in word] == words


def test_of_a_recording_that_watches_everything_what_came_after_the_last_look_is_named() -> None:
    header = _header(groups=(_group(layers=1, captured=64),), slot_history="complete")
    assert not_watched(_rows(header, settings=SETTINGS | {"kv_hash": "all"})) == [AFTERWARDS]


def test_what_no_forward_showed_is_named_for_each_runner() -> None:
    header = _header(
        groups=(_group(), _group("draft", runner=1)), runners=(Runner(), Runner(name="draft", derived=("positions",)))
    )
    figures = no_figures(header)
    figures[0] = [10, 10, 10, 10, 10, 10, 100, 3, 0, 10, 10]
    figures[1] = [8, 4, 8, 0, 8, 8, 80, 0, 0, 8, 2]
    given = {"recorded": 20, "judged": 18, "entries_read": 50, "unknown_entries": 5, "settings": SETTINGS}
    rows = coverage(header, figures, no_samples(header), TOLD, **given)
    words = not_watched(rows)
    assert "2 of 20 forwards, which were left out" in words
    assert "KV bytes of prefixes in 4 of 8 forwards of draft" in words
    assert "what attention was given of draft" in words
    assert "what came out of attention in 6 of 8 forwards of draft" in words
    assert "positions (derived) of draft" in words
    assert "3 of 180 input tokens, which are unknown" in words
    assert "5 of 50 slots read: nobody knows what they must hold" in words
    assert next(row for row in rows if (row.what, row.name) == ("bytes_watched", "draft")).share == 0.5


def test_a_runner_some_of_whose_streams_were_compared_was_not_watched_in_full(tmp_path: Path) -> None:
    engine = EngineConfig(shape="swa", submitted=True)
    with SimulatedEngine(engine, WORKLOAD, tmp_path / "t.arrow") as run:
        run.run()
    rows = {row.what: row for row in replay(tmp_path / "t.arrow", settings=ReplaySettings(), report=None).coverage}
    assert rows["submitted"].share == 1.0
    kept = SimulatedRunner.submitted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedRunner, "submitted", lambda self, batch: dict(list(kept(self, batch).items())[1:]))
        with SimulatedEngine(engine, WORKLOAD, tmp_path / "u.arrow") as run:
            run.run()
    rows = {row.what: row for row in replay(tmp_path / "u.arrow", settings=ReplaySettings(), report=None).coverage}
    assert (rows["submitted"].watched, rows["submitted"].words) == (0, "KV bytes on their way into the pool")


def test_why_nothing_was_handed_in_is_said_once(tmp_path: Path) -> None:
    with SimulatedEngine(EngineConfig(), WORKLOAD, tmp_path / "t.arrow") as run:
        run.run()
    rows = replay(tmp_path / "t.arrow", settings=ReplaySettings(), report=None).coverage
    assert [(row.watched, row.reason) for row in rows if row.what == "submitted"] == [(0, "not configured")]


def test_which_positions_sliding_layers_read_is_watched_where_it_is_told(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring.arrow")
    for extend in (3, 1, 1):
        ring.forward(extend)
    (row,) = [row for row in ring.judged().coverage if row.what == "window"]
    assert (row.watched, row.total, row.words) == (3, 3, "")
    with SimulatedEngine(EngineConfig(shape="swa"), WORKLOAD, tmp_path / "t.arrow") as run:
        run.run()
    (row,) = [
        row
        for row in replay(tmp_path / "t.arrow", settings=ReplaySettings(), report=None).coverage
        if row.what == "window"
    ]
    assert (row.watched, row.words) == (0, "which positions sliding layers read")


@pytest.mark.parametrize("executor", ["interval", "stepwise"])
def test_the_summary_names_the_executor_that_ran(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = DATA / "clean_llama.arrow"
    settings = ReplaySettings(executor=executor)
    assert replay(trace, settings=settings, report=None).settings["executor_ran"] == executor
    monkeypatch.setattr("kvcanary.replayer.executors.executors.covered_by", lambda *_: {"of_ones_own": Covered.NOTHING})
    ran = replay(trace, settings=settings, report=None).settings
    assert (ran["executor"], ran["executor_ran"]) == (executor, "stepwise")


def test_what_the_recorder_leaves_out_is_named_with_its_reason() -> None:
    left_out = (
        NotWatched(what="pool", name="the mamba pool", reason="its states have no slots"),
        NotWatched(what="layers", name="full", reason="layer 2 has no cache of its own"),
    )
    rows = _rows(_header(not_watched=left_out))
    assert "the mamba pool" in not_watched(rows)
    assert [row.reason for row in rows if row.what == "layers"] == ["layer 2 has no cache of its own"]


def test_a_rank_speaks_for_itself() -> None:
    header = _header(ranks=Ranks(tp_size=2))
    assert "the other rank" in not_watched(_rows(header))
    one, other = (
        Summary(trace="t", header=_header(ranks=Ranks(tp_rank=rank, tp_size=2)), settings=SETTINGS) for rank in (0, 1)
    )
    assert (ranks_there([one]), ranks_there([one, other])) == (False, True)


def test_an_older_recording_says_that_it_does_not_say() -> None:
    words = not_watched(_rows(_header(format_minor=2, groups=(_group(layers=0),))))
    assert "other pools, draft models, CUDA graphs (not said by this recording)" in words
    assert "every layer but 0" in words


def test_settings_that_leave_something_out_are_named() -> None:
    settings = SETTINGS | {"kv_hash": "none", "checks": [name for name in CHECK_NAMES if name != "write_lost"]}
    words = not_watched(_rows(_header(), settings=settings))
    assert "128 of a slot's 128 bytes (--kv-hash none)" in words
    assert "the checks write_lost (--checks)" in words


@pytest.mark.parametrize("trace", ["sglang/clean_eagle_h200.arrow", "simulated/overlap_future_map_overrun.arrow"])
def test_executors_agree_and_every_screen_says_it(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Summary] = [
        replay(DATA / trace, settings=ReplaySettings(executor=executor), report=None)
        for executor in ("interval", "stepwise")
    ]
    rows = [[row.to_json() for row in summary.coverage] for summary in found]
    assert rows[0] == rows[1] == found[0].to_json()["coverage"]
    show(Console(width=80), found[0])
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    at = next(number for number, line in enumerate(said) if line.startswith("not watched  "))
    assert all(len(line) <= 80 for line in said[at : at + 6])
    assert "not watched: " in one_line(found[0])
    assert "nothing lost" not in "\n".join(said)
