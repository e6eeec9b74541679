"""`kvcanary-replay --jobs`: the same results as one after another, whatever becomes of a worker."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import Ranks
from kvcanary.recorder.trace.recordings import group_recordings
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.run.settings import ReplaySettings
from kvcanary.replayer.workers import jobs as sharing
from kvcanary.replayer.workers.group_replay import GroupTask
from kvcanary.replayer.workers.jobs import Job, plan_jobs
from kvcanary.replayer.workers.pool import replay_in_workers
from kvcanary.replayer.workers.server import start_server

from ..support.engines.toy_engine import SHAPES, ToyEngine, record
from ..support.places import DATA
from ..support.raw_traces import as_rank
from .underway import wait_until_under_way

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all


def replay(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(replay_command, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


def without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if key not in ("seconds", "report")}
    return [without_times(value) for value in found] if isinstance(found, list) else found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything at once: two ranks that disagree, a pair of engines, a fault, and two files that are no traces."""
    made = tmp_path_factory.mktemp("all")

    def shift(number: int, event: TraceEvent) -> None:
        if number == 30:
            event.ints["positions"] = event.ints["positions"] + 1

    for rank, change in ((0, lambda *_: None), (1, shift)):
        as_rank(DATA / "clean_llama.arrow", made / f"tp{1 - rank}.arrow", Ranks(tp_rank=rank, tp_size=2), change)
    for side in ("prefill", "decode"):
        shutil.copy(DATA / "simulated" / "pd_transfer_wrong_stride" / f"{side}.arrow", made)
    shutil.copy(DATA / "kv_flip.arrow", made)
    (made / "foreign.arrow").write_bytes(b"PAR1 and so on")
    (made / "half.arrow").write_bytes((DATA / "clean_llama.arrow").read_bytes()[:40_000])
    return made


def test_jobs_give_what_one_after_another_gives(folder: Path, tmp_path: Path) -> None:
    told = {}
    for jobs in (1, 2):
        code, out, err = replay("--json", "--jobs", jobs, "--report", tmp_path / str(jobs), folder)
        told[jobs] = (code, without_times(json.loads(out)), err)
    assert told[1] == told[2]
    code, found, _ = told[1]
    assert code == 1
    assert {Path(one["trace"]).name: one["exit_code"] for one in found["recordings"]} == {
        "tp0.arrow": 1, "tp1.arrow": 0, "prefill.arrow": 0, "decode.arrow": 1, "kv_flip.arrow": 1, "foreign.arrow": 2,
        "half.arrow": 125,
    }  # fmt: skip
    (engine,) = found["ranks"]
    (compared,) = engine["compared"]
    assert compared["forwards_differing"] == 1
    reports = {jobs: sorted(path.relative_to(tmp_path / str(jobs)) for path in (tmp_path / str(jobs)).rglob("*.parquet"))
               for jobs in (1, 2)}  # fmt: skip
    assert reports[1] == reports[2]
    for name in reports[1]:
        assert pq.read_table(tmp_path / "1" / name).equals(pq.read_table(tmp_path / "2" / name)), name


def test_lines_come_in_the_order_of_one_after_another(folder: Path) -> None:
    one, two = (replay("--quiet", "--no-report", "--jobs", jobs, folder) for jobs in (1, 2))
    assert one == two
    assert len(one[1].splitlines()) == 6


def results(traces: list[Path], task: GroupTask, jobs: int) -> list[tuple[str, Any]]:
    recordings, _ = group_recordings(traces)
    plan = plan_jobs([Job(recording=recording) for recording in recordings])
    found = replay_in_workers(plan, task, lambda _: None, jobs=jobs)
    return [(group[0].recording.paths[0].name, result) for group, result in found]


def test_a_worker_that_is_killed_takes_its_own_trace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a replay kills the process at one of the traces, as the system does when memory runs out."""
    module = "import os, signal\ndef follow(summary):\n    if 'kv_flip.' in summary.trace: os.kill(os.getpid(), signal.SIGKILL)\n    return 'done'\n"  # fmt: skip
    (tmp_path / "what_follows.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    from what_follows import follow

    task = GroupTask(settings=ReplaySettings(), explicit=False, all_there=False, finish=follow)
    traces = [DATA / f"{name}.arrow" for name in ("clean_llama", "kv_flip", "table_swap", "clean_hybrid")]
    found = results(traces, task, 2)
    assert [name for name, _ in found] == [trace.name for trace in traces]
    by_name = dict(found)
    assert "was ended by SIGKILL, as the system does when memory runs out" in by_name.pop("kv_flip.arrow").error
    assert all(result.notes == ["done"] and not result.error for result in by_name.values())


def test_what_nobody_foresaw_is_the_error_of_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "def follow(summary):\n    if 'kv_flip' in summary.trace: raise KeyError('gone')\n    return ''\n"
    (tmp_path / "what_fails.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    from what_fails import follow

    task = GroupTask(settings=ReplaySettings(), explicit=False, all_there=False, finish=follow)
    (_, bad), (_, good) = results([DATA / "kv_flip.arrow", DATA / "clean_llama.arrow"], task, 2)
    assert "internal error: KeyError: 'gone'" in bad.error
    assert good.summaries[0].verdict.exit_code == 0


@pytest.fixture
def no_server() -> Iterator[None]:
    """Nothing to fork workers from yet, and none left for the tests that follow: a server keeps the surroundings of its
    start."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.mark.usefixtures("no_server")
def test_a_worker_that_cannot_load_says_why_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "numba.py").write_text("raise OSError('no room for it')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # where nothing is compiled yet
    task = GroupTask(settings=ReplaySettings(), explicit=False, all_there=False)
    found = results([DATA / "kv_flip.arrow", DATA / "clean_llama.arrow"], task, 2)
    assert all("cannot load its libraries (OSError: no room for it)" in result.error for _, result in found)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("most", [0, 1])
def test_where_no_more_processes_start_those_that_there_are_do_it(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = BaseProcess.start, []

    def limited(process: BaseProcess) -> None:
        if len(started) >= most:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(process)
        start(process)

    monkeypatch.setattr(BaseProcess, "start", limited)
    task = GroupTask(settings=ReplaySettings(), explicit=False, all_there=False)
    found = results([DATA / "kv_flip.arrow", DATA / "clean_llama.arrow"], task, 2)
    if most:
        assert [result.summaries[0].verdict.exit_code for _, result in found] == [1, 0]
    else:
        assert all("no process can be started for it (Resource temp" in result.error for _, result in found)


@pytest.mark.usefixtures("no_server")
@pytest.mark.long
def test_a_server_that_cannot_fork_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whose module is loaded by the server takes its fork away there; workers that are new processes need none."""
    module = "import errno, os\ndef fork():\n    raise BlockingIOError(errno.EAGAIN, 'none left')\nos.fork = fork\ndef follow(summary):\n    return str(os.getppid())\n"  # fmt: skip
    (tmp_path / "no_forks.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    fork = os.fork
    from no_forks import follow

    os.fork = fork
    task = GroupTask(settings=ReplaySettings(), explicit=False, all_there=False, finish=follow)
    found = results([DATA / "kv_flip.arrow", DATA / "clean_llama.arrow"], task, 2)
    assert [result.summaries[0].verdict.exit_code for _, result in found] == [1, 0]
    assert [result.notes for _, result in found] == [[str(os.getpid())]] * 2
    assert capfd.readouterr().err == ""


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path) -> None:
    here, script = tmp_path / "here", tmp_path / "replay.py"
    here.mkdir()
    for module in ("kvcanary", "numba", "pyarrow"):
        (here / f"{module}.py").write_text("import sys\nsys.stderr.write(f'{__name__} from here\\n')\n")
    script.write_text("from kvcanary.cli import replay_main\nif __name__ == '__main__':\n    replay_main()\n")
    done = subprocess.run(
        [
            sys.executable,
            script,
            "--jobs",
            "2",
            "-q",
            "--no-report",
            DATA / "clean_llama.arrow",
            DATA / "kv_flip.arrow",
        ],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.usefixtures("no_server")
def test_a_server_that_was_killed_is_started_again() -> None:
    task = GroupTask(settings=ReplaySettings(), explicit=False, all_there=False)
    for _ in range(2):
        found = results([DATA / "kv_flip.arrow", DATA / "clean_llama.arrow"], task, 2)
        assert [result.summaries[0].verdict.exit_code for _, result in found] == [1, 0]
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.long
def test_ctrl_c_judges_what_was_under_way_and_leaves_out_the_rest(sent: signal.Signals, tmp_path: Path) -> None:
    """And so do SIGTERM and a closed terminal, which come to the workers too."""
    traces = [record(ToyEngine(SHAPES["full"], seed=4, forwards=9000), tmp_path / "0.arrow")]
    traces += [Path(shutil.copy(traces[0], tmp_path / f"{number}.arrow")) for number in (1, 2)]
    code = (
        "import sys; from kvcanary.cli import replay_main; "
        f"sys.argv[1:] = ['--jobs', '2', '-q', '--backend', 'reference', *{[str(trace) for trace in traces]!r}]; "
        "replay_main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    begun = [tmp_path / f"{number}.report" / "violations.parquet.partial" for number in (0, 1)]
    wait_until_under_way(process, begun, cpu_seconds=0.3)  # within the first of its batches, at whose ends they look
    os.killpg(process.pid, sent)
    out, err = process.communicate()
    assert process.returncode == 125, (out, err)
    assert out.count("interrupted after") == 2
    assert "interrupted: 1 more not replayed" in err
    assert "Traceback" not in err
    for report in begun:
        assert json.loads((report.parent / "summary.json").read_text())["verdict"] == "inconclusive"


def children(pid: int) -> int:
    """How many processes a process has started that are still there."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            found += stat.read_text().rpartition(")")[2].split()[1] == str(pid)
    return found


def test_ctrl_c_while_workers_load_ends_without_tracebacks(tmp_path: Path) -> None:
    traces = [shutil.copy(DATA / name, tmp_path) for name in ("clean_llama.arrow", "kv_flip.arrow")]
    code = "from kvcanary.cli import replay_main; replay_main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--jobs", "2", "-q", "--no-report", "--backend", "reference", *traces],  # slow
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while process.poll() is None and children(process.pid) < 2:  # their server, and who keeps book of resources
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert "Traceback" not in err
    assert (process.returncode, out) == (130, "")


@pytest.mark.usefixtures("no_server")
def test_ctrl_c_never_reaches_the_server() -> None:
    resource_tracker._resource_tracker._stop()  # so that it is started with the server, as in every command
    start_server()
    status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
    blocked = next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1]
    assert int(blocked, 16) & 1 << (signal.SIGINT - 1)


def test_workers_only_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings, _ = group_recordings([DATA / "kv_flip.arrow", DATA / "clean_llama.arrow", DATA / "table_swap.arrow"])
    plan = plan_jobs([Job(recording=recording) for recording in recordings])
    monkeypatch.setattr(sharing, "usable_cores", lambda: 8)
    assert sharing.default_jobs(plan) == 1
    monkeypatch.setattr(sharing, "WORTH_A_WORKER_BYTES", 50_000)
    assert sharing.default_jobs(plan) == 3
    free = 5 * sum(sharing.memory_needed(group) for group in plan.groups) // 3
    monkeypatch.setattr(sharing, "free_memory_bytes", lambda: free)
    assert sharing.default_jobs(plan) == 2
    header = recordings[0].header
    assert header is not None
    large = replace(header, groups=tuple(replace(group, num_slots=1 << 31) for group in header.groups))
    for group in plan.groups:
        group[0].recording = replace(group[0].recording, header=large)
    assert sharing.default_jobs(plan) == 1


def test_devices_are_taken_in_turn_and_names_of_none_refused() -> None:
    traces = [DATA / "clean_llama.arrow", DATA / "clean_hybrid.arrow"]
    code, out, _ = replay("--json", "--no-report", "--devices", "cpu, cpu", *traces)
    assert (code, [one["settings"]["device"] for one in json.loads(out)]) == (0, ["cpu", "cpu"])
    result = CliRunner().invoke(replay_command, ["--devices", "cpu,gpu", *map(str, traces)])
    assert result.exit_code == 2
    assert "'gpu' is no device" in result.stderr
    result = CliRunner().invoke(replay_command, ["--devices", "cuda:0", "--device", "cuda:1", *map(str, traces)])
    assert result.exit_code == 2
    assert "exclude one another" in result.stderr
