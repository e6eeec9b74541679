"""`kvcanary fleet replay`: every recording once, the verdict that kvcanary-replay gives, whatever is lost on the way."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from kvcanary.analysis.errors import AnalysisError
from kvcanary.analysis.fleet import committing
from kvcanary.analysis.fleet import workers as fleet_workers
from kvcanary.analysis.fleet.tasks import traces_below
from kvcanary.analysis.fleet.workers import LostError, Processes
from kvcanary.recorder.trace.header import Ranks
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.workers import group_replay
from kvcanary.replayer.workers.group_replay import GroupResult

from ..support.commands import run, run_replay
from ..support.places import DATA
from ..support.raw_traces import as_rank, cut
from ..support.stand_in_ray import StandInRay, stand_in_ray

__all__ = ["stand_in_ray"]


def fleet(*arguments: object, address: str = "auto") -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What it says of all, and of each recording by the name of its file."""
    done = run("fleet", "replay", *arguments, "--address", address, "--json")
    told = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode and "not seen by all machines" not in done.stderr
    return told, {Path(row["trace"]).name: row for row in told["recordings"]}


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two servers below a prefix: ranks of one and what is no trace; both sides of a deployment, of which segments lie twice."""
    made = tmp_path_factory.mktemp("fleet")
    for rank in (0, 1):
        ranks = Ranks(tp_rank=rank, tp_size=2)
        (made / "tp").mkdir(exist_ok=True)
        as_rank(DATA / "clean_llama.arrow", made / "tp" / f"{rank}.arrow", ranks, lambda *_: None)
    (made / "tp" / "foreign.arrow").write_bytes(b"PAR1 and so on")
    (made / "pd").mkdir()
    for side in ("prefill", "decode"):
        shutil.copy(DATA / "simulated" / "pd_transfer_wrong_stride" / f"{side}.arrow", made / "pd")
    (whole,) = run_trial(Trial(fault=FAULTS["kv_used"], config="mha", seed=0), made / "whole.arrow").traces
    segments = cut(whole, made / "long.arrow", seed=0, least=40, most=150)
    whole.unlink()
    frozen = made / "long.frozen-1"
    frozen.mkdir()
    shutil.copy(segments[1], frozen)
    return made


def test_each_recording_has_the_verdict_of_a_replay_of_its_folder(
    traces: Path, tmp_path: Path, stand_in_ray: StandInRay
) -> None:
    stand_in_ray.cores = 10  # so that the long one is split
    told, rows = fleet(traces, "-o", tmp_path / "out")
    expected = {}
    for folder in (traces, traces / "tp", traces / "pd"):
        found = json.loads(run_replay("--no-report", "--json", folder).stdout)
        expected |= {Path(one["trace"]).name: one for one in found["recordings"]}
    assert rows.keys() == expected.keys()
    for name, row in rows.items():
        assert row["exit_code"] == expected[name]["exit_code"], row
        if "error" not in row:
            assert [row[k] for k in ("forwards", "violations", "findings", "doubts")] == [
                expected[name][k] for k in ("forwards", "violations", "findings", "doubts")
            ], name
    assert told["exit_code"] == 1
    assert len(stand_in_ray.asked) > 4  # stretches, and who joined them
    assert all(one["memory"] >= 400 << 20 and one["max_retries"] == 2 for one in stand_in_ray.asked)
    asked = run("sql", tmp_path / "out" / "table", "select trace, verdict, report from reports", "--json")
    table = {Path(row["trace"]).name: row for row in json.loads(asked.stdout)}
    assert table.keys() == rows.keys() - {"foreign.arrow"}
    for name, row in table.items():
        assert row["report"] == rows[name]["report"]
        assert (row["report"] is None) == (row["verdict"] == "clean")
        if row["report"]:
            assert json.loads((Path(row["report"]) / "summary.json").read_text())["report"] == row["report"]
            assert run("incidents", row["report"]).returncode == 0
    assert not list((tmp_path / "out" / ".scratch").iterdir())


def test_again_it_does_only_what_is_new_and_what_failed(traces: Path, tmp_path: Path, stand_in_ray: StandInRay) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    shutil.copytree(traces / "tp", mine)
    first, _ = fleet(mine, "-o", out)
    assert (first["already"], len(stand_in_ray.asked)) == (0, 2)
    before = files(out)
    again, _ = fleet(mine, "-o", out)
    assert (again["already"], len(stand_in_ray.asked)) == (2, 3)  # what is no trace, once more
    assert files(out) == before
    assert again["recordings"] == first["recordings"]
    shutil.copy(DATA / "clean_hybrid.arrow", mine / "foreign.arrow")  # mended
    assert "clean" in json.dumps(fleet(mine, "-o", out)[1]["foreign.arrow"])
    # a worker that was killed before its last step leaves all but the result, and its scratch folder
    one = next((out / "results").iterdir())
    (out / ".scratch" / f"{one.stem}.abc").mkdir()
    one.unlink()
    before = files(out / "table")
    told, _ = fleet(mine, "-o", out)
    assert told["exit_code"] == 0
    assert one.exists()
    assert files(out / "table").keys() == before.keys()
    assert not list((out / ".scratch").iterdir())


def test_another_run_at_the_same_task_keeps_its_files_and_its_result_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in_ray: StandInRay
) -> None:
    traces, out = tmp_path / "in", tmp_path / "out"
    traces.mkdir()
    shutil.copy(DATA / "clean_llama.arrow", traces)
    first, _ = fleet(traces, "-o", out)
    [result] = (out / "results").iterdir()
    theirs, done = out / ".scratch" / f"{result.stem}.theirs", result.read_bytes()
    theirs.mkdir()
    result.unlink()
    descriptor = os.open(theirs, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as they do while they write to it
        fleet(traces, "-o", out)
        assert [path.name for path in (out / ".scratch").iterdir()] == [theirs.name]
    finally:
        os.close(descriptor)
    result.unlink()

    def fails(*_: object) -> GroupResult:
        result.write_bytes(done)  # they end first
        return GroupResult(error="the report cannot be written")

    monkeypatch.setattr(committing, "replay_group", fails)
    again, _ = fleet(traces, "-o", out)
    assert again["recordings"] == first["recordings"]


def test_a_full_disk_names_no_option_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in_ray: StandInRay
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(group_replay, "replay_joined", full)
    _, rows = fleet(DATA / "clean_llama.arrow", "-o", tmp_path / "out")
    error = rows["clean_llama.arrow"]["error"]
    assert error.endswith("(No space left on device); make room, and run the same command again")


def test_a_folder_that_cannot_be_read_is_not_one_without_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(DATA / "clean_llama.arrow", tmp_path)
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(AnalysisError, match="cannot be read: Permission denied"):
        traces_below(tmp_path)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError):
        traces_below(tmp_path)


def refused(*_: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_gaps_of_what_lies_in_a_store_are_looked_at_again(tmp_path: Path, stand_in_ray: StandInRay) -> None:
    store, data = fsspec.filesystem("memory"), (DATA / "clean_llama.arrow").read_bytes()
    store.pipe("/fleet/in/deep/t.arrow", data[:60_000])
    for _ in range(2):
        told, rows = fleet("memory://fleet", "-o", tmp_path / "out")
        assert (told["exit_code"], told["already"]) == (125, 0)
        assert rows["t.arrow"]["num_gaps"]
    store.pipe("/fleet/in/deep/t.arrow", data)
    assert [fleet("memory://fleet", "-o", tmp_path / "out")[0]["already"] for _ in range(2)] == [0, 1]
    assert len(list((tmp_path / "out" / "table").rglob("*.parquet"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{tmp}/none", "-o", "{tmp}/out"), "none: no such"),
        (("{tmp}", "-o", "{tmp}/out"), "no .arrow file in it or below it"),
        (("{data}", "-o", "/proc/out"), "/proc/out"),
        (
            ("{data}", "-o", "{tmp}/out", "--address", "nowhere:1"),
            "no Ray cluster answers at nowhere:1 (nobody there); start",
        ),
        (("{data}", "-o", "{tmp}/out", "--address", "auto", "--device", "cuda"), "has no GPU"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path, stand_in_ray: StandInRay
) -> None:
    done = run("fleet", "replay", *[one.format(tmp=tmp_path, data=DATA) for one in arguments])
    [line] = [line for line in done.stderr.splitlines() if "(raylet)" not in line]
    assert (done.returncode, said in line) == (2, True), line


def test_memory_is_asked_for_again_and_tasks_show_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may say that it has an eighth of what it gets once it uses that; what tasks ask for is an upper bound."""
    gib = 1 << 30
    free = 1.5 * gib
    monkeypatch.setattr(fleet_workers, "free_memory_bytes", lambda: free)
    workers = Processes(3)
    try:
        assert workers.room(4 * gib)  # one in any case
        first = workers.submit(time.sleep, 0, memory_bytes=gib)
        assert not workers.room(gib)
        free = 8 * gib  # it has grown
        assert workers.room(gib)
        free = 1.5 * gib
        assert not workers.room(gib)
        assert workers.done() == [first]
        workers.submit(time.sleep, 60, memory_bytes=gib)
        assert workers.room(gib)  # as the first took a tenth of what it had asked for
        workers.submit(time.sleep, 60, memory_bytes=gib)
        free = 0.5 * gib  # somebody else has it
        assert not workers.room(gib)
        assert (workers.most_at_once, workers.held_back) == (2, True)
    finally:
        workers.close()


def test_it_says_where_the_time_went_and_what_memory_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clean_llama", "clean_hybrid"):
        shutil.copy(DATA / f"{name}.arrow", tmp_path)
    told = json.loads(run("fleet", "replay", tmp_path, "-o", tmp_path / "out", "--jobs", 2, "--json").stdout)
    work = told["work"]
    assert (work["workers"], work["most_at_once"], work["memory_held_back"]) == (2, 2, False)
    assert 0 < work["replay_seconds"] < work["busy_seconds"] < 2 * work["tasks_seconds"] + 1
    monkeypatch.setattr(fleet_workers, "free_memory_bytes", lambda: 1 << 20)
    done = run("fleet", "replay", tmp_path, "-o", tmp_path / "other", "--jobs", 2)
    assert done.returncode == 0
    assert "note: at most 1 of 2 workers were at work at once: the machine has not memory" in done.stderr


def test_neither_driver_nor_workers_load_duckdb_for_what_is_clean() -> None:
    """It takes each of them a fifth of a second, and may say at its end, on standard error, that it leaked."""
    code = "import sys, kvcanary.analysis.cli.fleet, kvcanary.analysis.fleet.workers; print('duckdb' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True) == "False\n"


def _runs(pid: int) -> bool:
    """Whether a process runs; it may end, and its parent may fetch it, between any two looks at it."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_lost_process_was_at_is_done_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = (
        "import os, signal, pathlib\n"
        "def work(name):\n"
        "    with open(name, 'a') as file: file.write(f'{os.getpid()}\\n')\n"
        "    tries = len(pathlib.Path(name).read_text().split())\n"
        "    if tries < int(name[-1]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return tries\n"
    )
    (tmp_path / "what_is_killed.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    from what_is_killed import work

    workers = Processes(2)
    try:
        calls, found = {}, {}
        for name in ("once1", "twice2", "never9"):
            while not workers.room(1):
                for call in workers.done():
                    found[calls[call]] = call
            calls[workers.submit(work, str(tmp_path / name), memory_bytes=1)] = name
        while len(found) < 3:
            found |= {calls[call]: call for call in workers.done()}
        assert (workers.result(found["once1"]), workers.result(found["twice2"])) == (1, 2)
        with pytest.raises(LostError, match="was ended 3 times"):
            workers.result(found["never9"])
        pids = [int(pid) for path in tmp_path.glob("*[0-9]") for pid in path.read_text().split()]
    finally:
        workers.close()
    assert len(pids) == 6
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
