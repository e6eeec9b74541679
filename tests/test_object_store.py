"""Traces and reports in an object store: read as local ones are, whatever goes wrong on the way, and moved there whole."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kvcanary.analysis.store import sources
from kvcanary.recorder import remote
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.trace.batch import TraceGap
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.cli.replay import replay_command

from .support.commands import run, run_replay
from .support.hand_made import HEADER
from .support.object_store import FaultyProxy, names, object_store, put
from .support.places import DATA
from .support.stand_in_ray import StandInRay, stand_in_ray

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

__all__ = ["stand_in_ray"]

CORRUPT = DATA / "simulated" / "mla_free_too_early.arrow"


@pytest.fixture(scope="module")
def bucket() -> Iterator[FaultyProxy]:
    patch = pytest.MonkeyPatch()
    with object_store(patch) as proxy:
        patch.setattr(remote, "WAITS_S", [0.01, 0.01, 0.01])
        yield proxy
    patch.undo()


@pytest.fixture
def store(bucket: FaultyProxy) -> Iterator[FaultyProxy]:
    bucket.heal()
    yield bucket
    bucket.heal()


@pytest.fixture(scope="module")
def corrupt(bucket: FaultyProxy) -> str:
    return put(CORRUPT, "traces/corrupt.arrow", bucket)


def verdict(*arguments: object) -> dict[str, Any]:
    """Replay, and return what does not hang on where the trace lies."""
    said = json.loads(run_replay("--json", "--no-report", *arguments).stdout)
    return {name: value for name, value in said.items() if name not in ("trace", "seconds", "gaps", "settings")}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return verdict(CORRUPT)


@pytest.mark.parametrize("fault", ["", "reset", "503", "truncated", "slow"])
def test_the_verdict_is_that_of_the_local_file(
    fault: str, store: FaultyProxy, corrupt: str, expected: dict[str, Any]
) -> None:
    store.only, store.faults = "^GET /bkt/traces", [fault] * 2
    assert verdict(corrupt) == expected
    assert not store.faults


@pytest.mark.parametrize(
    ("url", "fault", "said"),
    [
        ("s3://bkt/traces/gone.arrow", "", "no such object"),
        ("s3://nobody/gone.arrow", "", "there is no such bucket"),
        ("s3://bkt/traces/corrupt.arrow", "403", "the store denies access; credentials come from the environment"),
        ("s3://bkt/traces/corrupt.arrow", "503", "failed 4 times, last with: "),
        ("s3://bkt/traces/", "reset", "failed 4 times, last with: "),
        ("nonsense://bkt/trace.arrow", "", "Protocol not known: nonsense"),
    ],
)
def test_what_no_try_helps_against_is_one_line(
    url: str, fault: str, said: str, store: FaultyProxy, corrupt: str
) -> None:
    store.always = fault
    done = CliRunner().invoke(replay_command, ["--no-report", url])
    text = done.stderr
    if isinstance(done.exception, OSError):  # which `run_program` prints
        text = f"{done.exception.filename}: {done.exception.strerror}\n"
    else:
        assert done.exit_code == 2
    assert (text.count("\n"), said in text, url.rstrip("/") in text) == (1, True, True), text


def test_an_object_that_fails_under_way_is_a_gap_and_not_waited_for_again(store: FaultyProxy, corrupt: str) -> None:
    with TraceReader(corrupt) as reader:  # header and footer came
        store.always, store.requests = "503", []
        store.only = "^GET"
        [gap] = reader.stream()
    assert isinstance(gap, TraceGap)
    assert (gap.missing_events, "cannot be read (failed 4 times" in gap.cause) == (None, True)
    assert len(store.requests) < 10
    with pytest.raises(UnreadableTraceError, match=r"cannot be read \(failed 4 times"):
        TraceReader(corrupt)


def test_torn_traces_and_segments(store: FaultyProxy, tmp_path: Path) -> None:
    torn = tmp_path / "torn.arrow"
    torn.write_bytes(CORRUPT.read_bytes()[:60_000])
    assert verdict(put(torn, "torn/torn.arrow", store)) == verdict(torn)
    recorder(tmp_path / "here", 3).close()
    local = json.loads(run_replay("--json", "--no-report", tmp_path / "here").stdout)
    url = put(tmp_path / "here", "segments", store)
    there = json.loads(run_replay("--json", "--no-report", url).stdout)
    assert [one["segments"] for one in there["recordings"]] == [[0, 1, 2, 3]]
    assert [one["events"] for one in there["recordings"]] == [one["events"] for one in local["recordings"]]
    assert there["exit_code"] == local["exit_code"] == 125
    # Workers get their paths in a pickle.
    assert str(pickle.loads(pickle.dumps(remote.as_path(url) / "x.arrow"))) == "s3://bkt/segments/x.arrow"


@pytest.mark.long
def test_reports_there_are_asked_as_here(
    store: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in_ray: StandInRay
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.direct)
    shutil.copy(CORRUPT, tmp_path)
    assert ship(tmp_path, "traces", bucket="direct")[0] == 0
    corrupt = f"s3://direct/traces/{CORRUPT.name}"
    monkeypatch.setattr(sources, "user_cache", lambda: tmp_path / "cache")
    assert run("replay", "--no-page", corrupt).returncode == 1
    report = f"s3://direct/traces/{CORRUPT.stem}.report"
    done = run("ship", "--once", "--json", f"{CORRUPT.stem}.report", report)
    assert json.loads(done.stdout)["shipped"][-1] == f"{report}/summary.json"
    shutil.rmtree(f"{CORRUPT.stem}.report")
    asked = {
        ("sql", "select count(*) as n from violations where forward >= 0"): '"n": ',
        ("sql", "select count(*) as n from forwards"): '"n": 138',
        ("triage",): "free_too_early",
    }
    for (command, *query), said in asked.items():
        done = run(command, report, *query, "--json")
        assert (done.returncode, said in done.stdout) == (0, True), done.stderr
    assert run("collect", report, "s3://direct/table").returncode == 0
    assert run("collect", "s3://direct/traces", "s3://direct/table").returncode == 0
    made = run("fleet", "page", "s3://direct/table", "-o", tmp_path / "fleet.html")
    assert (made.returncode, "s3://direct/table" in (tmp_path / "fleet.html").read_text()) == (0, True), made.stderr
    done = run("sql", "s3://direct/table", "select kind, node, reports from kinds_by_node", "--json")
    assert json.loads(done.stdout) == [{"kind": "free_too_early", "node": "traces", "reports": 1}], done.stderr
    for already in (0, 1):  # a fleet's: all of it there, and once
        done = run("fleet", "replay", "s3://direct/traces", "-o", "s3://direct/fleet", "--address", "auto", "--json")
        assert (done.returncode, json.loads(done.stdout)["already"]) == (1, already), done.stderr
    [row] = json.loads(done.stdout)["recordings"]
    asked = run("sql", "s3://direct/fleet/table", "select report, kind from incidents", "--json")
    assert json.loads(asked.stdout) == [{"report": row["report"], "kind": "free_too_early"}]
    assert run("incidents", row["report"]).returncode == 0
    assert run("diff", corrupt, CORRUPT).returncode == 0
    assert run("inspect", "s3://direct/traces", "--json").returncode == 0
    assert run("page", report, "-o", "page.html").returncode == 0
    assert "is a URL, expected a local name" in run("page", report, "-o", "s3://bkt/page.html").stderr


def test_other_stores_come_through_fsspec(expected: dict[str, Any]) -> None:
    import fsspec

    with fsspec.open("memory://there/trace.arrow", "wb") as file:
        file.write(CORRUPT.read_bytes())
    assert verdict("memory://there/trace.arrow") == expected
    assert verdict(f"file://{CORRUPT}") == expected


def ship(folder: Path, key: str, *options: str, bucket: str = "bkt") -> tuple[int, dict[str, Any]]:
    done = run("ship", "--once", "--json", *options, folder, f"s3://{bucket}/{key}")
    return done.returncode, json.loads(done.stdout)


def recorder(folder: Path, count: int, **options: Any) -> TraceWriter:
    """A recording under way with so many finished segments."""
    folder.mkdir(exist_ok=True)
    writer = TraceWriter(folder / "t.arrow", HEADER, flush_interval_ns=1 << 60, segment_bytes=1, **options)
    for number in range(count + 1):
        assert writer.append(TraceEvent(kind="mark", time_ns=number, scalars={"note": f"{number}"}))
        assert writer.flush()
    return writer


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_of_a_recording_under_way_the_newest_stay(store: FaultyProxy, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    with recorder(folder, 5) as writer:
        writer.freeze("odd")
        while len([*folder.glob("*.frozen-*/*")]) < 6:
            time.sleep(0.01)
        code, said = ship(folder, "live", "--leave", "2")
        assert (code, said["deleted"], said["failed"]) == (0, 4, {})
        live = [f"t.{number:06d}.arrow" for number in (4, 5, 6)]
        assert [name for name in left(folder) if not name.startswith("t.arrow.tail")][:3] == live
        [frozen] = folder.glob("*.frozen-*")
        assert len(left(frozen)) == 6
        kept = names("live", store)
        assert kept[:6] == [f"t.{number:06d}.arrow" for number in range(6)]
        assert kept[6:] == [f"{frozen.name}/{name}" for name in left(frozen)]
    code, said = ship(folder, "live")
    assert (code, len(said["shipped"]), said["deleted"]) == (0, 1, 3)
    assert left(folder) == [frozen.name]
    assert ship(folder, "live")[1]["shipped"] == []
    [found] = json.loads(run("inspect", "s3://bkt/live", "--json").stdout)["recordings"]
    assert [one["state"] for one in found["files"]] == ["complete"] * 7


@pytest.mark.parametrize("fault", ["reset", "503", "flipped", "truncated"])
def test_what_fails_on_the_way_is_sent_again(fault: str, store: FaultyProxy, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    recorder(folder, 1).close()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    store.only, store.faults = "^(PUT|GET) /bkt/again", [fault] * 3
    status, said = ship(folder, f"again-{fault}")
    assert status == 0, json.dumps(said)
    assert not store.faults
    assert left(folder) == []
    assert names(f"again-{fault}", store) == sorted(whole)
    store.heal()
    for name, content in whole.items():
        with remote.RemotePath(f"s3://bkt/again-{fault}/{name}").open("rb") as file:
            assert file.read() == content


def test_what_was_moved_counts_though_no_answer_comes(store: FaultyProxy, tmp_path: Path) -> None:
    """The answer to the last step of a move is lost: the store has done it."""
    folder = tmp_path / "here"
    recorder(folder, 1).close()
    whole = left(folder)
    store.only, store.faults = "^DELETE /bkt/moved", ["lost"] * 2
    status, said = ship(folder, "moved")
    assert (status, store.faults, left(folder), names("moved", store)) == (0, [], [], whole), json.dumps(said)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("flipped", "failed 4 times, last with: what came back from the store differs from what was sent"),
        ("403", "the store denies access"),
        ("503", "failed 4 times"),
    ],
)
def test_what_was_not_verified_is_neither_named_there_nor_deleted_here(
    fault: str, said: str, store: FaultyProxy, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    recorder(folder, 1).close()
    before = left(folder)
    store.only, store.always = "^PUT " if fault == "flipped" else "^(PUT|POST) ", fault
    code, told = ship(folder, f"never-{fault}")
    assert (code, told["shipped"], left(folder)) == (2, [], before)
    assert [reason for reason in told["failed"].values() if said not in reason] == []
    store.heal()
    assert not [name for name in names(f"never-{fault}", store) if not name.startswith(".")]
    assert ship(folder, f"never-{fault}")[0] == 0
    assert (left(folder), names(f"never-{fault}", store)) == ([], before)


def test_what_is_no_trace_and_what_would_replace_another_is_said(store: FaultyProxy, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    recorder(folder, 0).close()
    shutil.copy(CORRUPT, folder / "other.arrow")
    (folder / "table.arrow").write_bytes(b"PAR1 and more")
    os.utime(folder / "table.arrow", (1, 1))  # else it may be a trace that begins
    put(DATA / "clean_llama.arrow", "taken/other.arrow", store)
    code, said = ship(folder, "taken")
    assert (code, said["deleted"], left(folder)) == (2, 1, ["other.arrow", "table.arrow"])
    assert "another trace of that name is there" in said["failed"][str(folder / "other.arrow")]
    assert "not a kvcanary trace but a Parquet file" in said["failed"][str(folder / "table.arrow")]
    assert ship(folder, "nowhere")[1]["shipped"] == ["s3://bkt/nowhere/other.arrow"]
    assert run("ship", folder, "/tmp").returncode == 2


def test_it_ends_with_sigterm_and_ships_as_it_goes(store: FaultyProxy, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    with recorder(folder, 2) as writer:
        command = [
            sys.executable,
            "-m",
            "kvcanary",
            "ship",
            "--every",
            "0.1",
            "--limit",
            "1MiB",
            folder,
            "s3://bkt/going",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in range(3, 5):
            while f"t.{number - 2:06d}.arrow" not in names("going", store):
                assert process.poll() is None
                time.sleep(0.05)
            writer.append(TraceEvent(kind="mark", time_ns=number, scalars={"note": "x"}))
            writer.flush()
        process.send_signal(signal.SIGTERM)
        said, wrong = process.communicate(timeout=60)
    assert (process.returncode, wrong) == (0, "")
    assert said.splitlines()[-1].startswith("total   ")
