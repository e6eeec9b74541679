"""A recording is judged while it is written: with the same result, in whatever pieces it comes, however its writer ends."""

import fcntl
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner
from kvcanary.recorder.trace.batch import TraceBatch
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.replayer.cli.watch import watch_command
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings
from kvcanary.replayer.watch.folder import STATE_FILE, WatchedFolder
from kvcanary.replayer.watch.reactions import Metrics, Reactions
from kvcanary.replayer.watch.recording import WatchedRecording

from ..support.engines.toy_engine import SHAPES, ToyEngine
from ..support.places import DATA
from ..support.raw_traces import cut, write_in_batches

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

SETTINGS = ReplaySettings()
KV_FLIP = DATA / "kv_flip.arrow"


@pytest.fixture(autouse=True)
def _as_urgent_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in this process, which has other tests to run."""
    monkeypatch.setattr("os.nice", lambda _: 0)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A whole trace of many small batches."""
    engine = ToyEngine(SHAPES["full"], seed=1, forwards=30)
    write_in_batches(tmp_path / "whole.arrow", engine.header, engine.events, flush_every=3)
    return tmp_path / "whole.arrow"


@contextmanager
def _writer(path: Path) -> Iterator[BinaryIO]:
    """Hold a file as the process does that records into it."""
    with path.open("wb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _step_to_the_end_of_what_is_there(one: WatchedRecording) -> None:
    while one.step():
        pass


@pytest.mark.parametrize("seed", range(6))
def test_a_file_that_grows_in_pieces_of_any_size(whole: Path, tmp_path: Path, seed: int) -> None:
    data, rng = whole.read_bytes(), random.Random(seed)
    with TraceReader(whole) as reader:
        ends = [item.end_byte for item in reader.stream() if isinstance(item, TraceBatch)]
        forwards = [
            sum(kind == "forward" for kind in item.kinds) for item in reader.stream() if isinstance(item, TraceBatch)
        ]
    grown = tmp_path / "grown.arrow"
    with _writer(grown) as file:
        file.write(data[: ends[0] + rng.randrange(9)])
        with closing(WatchedRecording([grown], SETTINGS)) as one:
            size = grown.stat().st_size
            while size < len(data):
                _step_to_the_end_of_what_is_there(one)
                assert one.run.summary.forwards == sum(n for n, end in zip(forwards, ends, strict=True) if end <= size)
                assert (one.run.waiting, one.over, one.run.summary.num_gaps) == (True, False, 0)
                size += file.write(data[size : size + rng.choice((1, 7, 8, 100, 5000, ends[-1]))])
            _step_to_the_end_of_what_is_there(one)
            assert not one.over  # whoever wrote it holds it still
            fcntl.flock(file, fcntl.LOCK_UN)
            _step_to_the_end_of_what_is_there(one)
            one.step()
            assert one.over
            one.finish()
            found = one.run.summary
    expected = replay(whole, settings=SETTINGS)
    ours, theirs = (json.loads(json.dumps(summary.to_json())) for summary in (found, expected))
    for name in ("seconds", "trace"):
        ours.pop(name), theirs.pop(name)
    assert ours == theirs


def test_a_writer_that_dies_leaves_what_a_replay_finds(whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.arrow"
    with _writer(cut) as file:
        file.write(whole.read_bytes()[:-700])
        with closing(WatchedRecording([cut], SETTINGS)) as one:
            _step_to_the_end_of_what_is_there(one)
            fcntl.flock(file, fcntl.LOCK_UN)
            while not one.over:
                one.step()
            one.finish()
            assert one.run.summary.cut
            assert one.run.summary.gaps == replay(cut).gaps


def test_segments_are_followed_and_the_last_says_that_it_is(tmp_path: Path) -> None:
    """A real recorder writes in a process of its own, and the segments come one by one."""
    record = (
        "import sys; from kvcanary.cli import kvcanary_main; sys.argv[1:] = ['simulate', '-o', 'live.arrow', "
        "'--requests', '100', '--segment-bytes', '30000', '--json']; kvcanary_main()"
    )
    writer = subprocess.Popen([sys.executable, "-c", record], cwd=tmp_path, stdout=subprocess.DEVNULL)
    news: list[tuple[str, dict[str, Any]]] = []
    with closing(WatchedFolder(tmp_path, SETTINGS, lambda what, _, facts: news.append((what, facts)))) as watched:
        while not watched.judged:
            watched.look()
            if not watched.step():
                time.sleep(0.05)
        assert writer.wait() == 0
    segments = sorted(tmp_path.glob("live.*.arrow"))
    assert len(segments) > 1
    assert [what for what, _ in news] == ["begun", "over"]
    facts = news[-1][1]
    assert (facts["verdict"], facts["recording"], facts["requests"]) == ("clean", "live.arrow", 100)
    assert facts["forwards"] == sum(replay(path).forwards for path in segments)


@pytest.mark.parametrize("state", ['{"torn": ', '{"x": {"verdict": "fine", "recording": "x"}}'])
def test_damage_is_told_once_and_what_is_judged_stays_judged(tmp_path: Path, state: str) -> None:
    for name in ("kv_flip.arrow", "clean_llama.arrow"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    (tmp_path / "notes.arrow").write_bytes(b"PAR1 is no trace")
    (tmp_path / STATE_FILE).write_text(state)
    frozen, called = tmp_path / "freeze", tmp_path / "called"
    command = f'echo "$KVCANARY_VERDICT $KVCANARY_REPORT $KVCANARY_INCIDENT" >> {called}'
    options = [str(tmp_path), "--once", "--json", "--freeze", str(frozen), "--on-incident", command]
    done = CliRunner().invoke(watch_command, options)
    news = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 1
    told = sorted((one["what"], one.get("recording")) for one in news)
    assert told.count(("damage", "kv_flip.arrow")) == 1
    assert told.count(("over", "kv_flip.arrow")) == told.count(("over", "clean_llama.arrow")) == 1
    assert ("unreadable", "notes.arrow") in told
    report = next(one for one in news if one["what"] == "report")
    assert report["verdict"] == "corrupt"
    assert "kv_changed" in report["first_incident"]
    assert Path(report["report"]) == tmp_path / "kv_flip.report"
    assert (tmp_path / "kv_flip.report" / "violations.parquet").exists()
    assert called.read_text().startswith(f"corrupt {tmp_path}/kv_flip.report KV bytes changed")
    assert "kv_flip.arrow" in frozen.read_text()
    verdicts = {one["recording"]: one["verdict"] for one in news[-1]["recordings"]}
    assert verdicts == {"kv_flip.arrow": "corrupt", "clean_llama.arrow": "clean"}

    called.unlink()
    again = CliRunner().invoke(watch_command, options)
    assert again.exit_code == 1
    assert not called.exists()
    assert [json.loads(line)["what"] for line in again.stdout.splitlines()] == ["unreadable", "end"]


def test_metrics_are_what_was_judged(tmp_path: Path) -> None:
    (tmp_path / "kv_flip.arrow").write_bytes(KV_FLIP.read_bytes())
    with (
        closing(WatchedFolder(tmp_path, SETTINGS, lambda *_: None)) as watched,
        closing(Metrics("127.0.0.1", 0)) as served,
    ):
        while not watched.judged:
            watched.look()
            watched.step()
        served.update(watched.facts())
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    found = replay(KV_FLIP)
    assert f'kvcanary_forwards_judged_total{{recording="kv_flip.arrow"}} {found.forwards}.0' in text
    for reason, count in found.violations_by_reason.items():
        assert f'kvcanary_violations_total{{reason="{reason}",recording="kv_flip.arrow"}} {count}.0' in text
    assert 'kvcanary_verdict{recording="kv_flip.arrow",verdict="corrupt"} 1.0' in text
    assert 'kvcanary_seconds_behind{recording="kv_flip.arrow"} 0.0' in text


@pytest.mark.parametrize("background", [False, True])
def test_a_signal_ends_a_watch_with_what_it_knows(background: bool, tmp_path: Path) -> None:
    """A script's shell has what it starts in the background ignore Ctrl-C: SIGTERM ends it."""
    watch = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); " if background else ""
    watch += "import sys; from kvcanary.cli import kvcanary_main; sys.argv[1:] = ['watch', '.', '--json', '--no-report']; kvcanary_main()"
    (tmp_path / "kv_flip.arrow").write_bytes(KV_FLIP.read_bytes())
    with subprocess.Popen([sys.executable, "-c", watch], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["what"] == "over":
                break
        process.send_signal(signal.SIGINT)
        if background:
            process.send_signal(signal.SIGTERM)
        assert json.loads(process.stdout.read().splitlines()[-1])["what"] == "end"
    assert process.returncode == 1


def _segments(folder: Path, trace: Path) -> list[Path]:
    return cut(trace, folder / "live.arrow", seed=1, least=8, most=12)


def test_a_watch_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    segments = _segments(tmp_path, KV_FLIP)
    news: list[tuple[str, dict[str, Any]]] = []

    def watched() -> WatchedFolder:
        return WatchedFolder(tmp_path, SETTINGS, lambda what, _, facts: news.append((what, dict(facts))))

    first = watched()
    first.look()
    (one,) = first.under_way
    while not one.damaged:
        one.step()
    assert one.facts()["violations_by_reason"]  # known before the end, for who is to be alarmed
    assert one.facts()["requests_hit"] == 1
    first.step()  # notices, and writes down how far it is; then it is killed
    again = watched()
    reached = json.loads((tmp_path / STATE_FILE).read_bytes())[one.trace_id]
    assert (reached["verdict"], reached["over"]) == ("corrupt", False)
    for path in segments[: reached["segment"]]:
        path.unlink()  # a flight recorder deletes what was judged
    with closing(first), closing(again):
        while not again.judged:
            again.look()
            again.step()
    assert [what for what, _ in news].count("damage") == 1
    whole = replay(KV_FLIP)
    facts = news[-1][1]
    assert (facts["verdict"], facts["forwards"], facts["violations"]) == ("corrupt", whole.forwards, whole.violations)


def test_segments_that_nobody_saw_leave_no_clean_verdict(tmp_path: Path) -> None:
    segments = _segments(tmp_path, DATA / "clean_llama.arrow")
    first = WatchedFolder(tmp_path, SETTINGS, lambda *_: None)
    first.look()
    first.under_way[0].step()
    first.step()
    reached = next(iter(json.loads((tmp_path / STATE_FILE).read_bytes()).values()))["segment"]
    for path in segments[: reached + 1]:
        path.unlink()
    done = CliRunner().invoke(watch_command, [str(tmp_path), "--once", "--json"])
    (facts,) = json.loads(done.stdout.splitlines()[-1])["recordings"]
    assert (done.exit_code, facts["verdict"]) == (125, "inconclusive")
    assert "1 segment(s) were deleted while nobody watched" in facts["doubts"]


@pytest.mark.long
def test_a_report_of_damage_outlives_the_segments_that_it_is_made_of(tmp_path: Path) -> None:
    segments = _segments(tmp_path, KV_FLIP)
    told: list[dict[str, Any]] = []
    made = Reactions(freeze_file=None, command=None, reports=True, say=told.append, on_incident=told.append)
    for calls in (True, False):
        made.report("live.arrow", segments, calls=calls)
        while made.busy:
            time.sleep(0.05)
        segments[0].unlink(missing_ok=True)
        segments = segments[-1:]
    assert [one["verdict"] for one in told] == ["corrupt"]
    said: list[str] = []
    Reactions(freeze_file=None, command=None, reports=True, say=said.append, on_incident=told.append).report(
        "gone.arrow", [], calls=True
    )
    assert said[0].startswith("gone.arrow: all of it has been deleted")
    assert json.loads((tmp_path / "live.report" / "summary.json").read_bytes())["verdict"] == "corrupt"


@pytest.mark.parametrize("wrong", ["a:b", "70000", "", "host:"])
def test_an_address_that_is_none(tmp_path: Path, wrong: str) -> None:
    done = CliRunner().invoke(watch_command, [str(tmp_path), "--metrics", wrong])
    assert done.exit_code == 2
    assert "[ADDRESS:]PORT" in done.output


def test_an_empty_folder_is_inconclusive(tmp_path: Path) -> None:
    done = CliRunner().invoke(watch_command, [str(tmp_path), "--once"])
    assert (done.exit_code, done.stdout) == (125, "nothing was recorded there\n")
