"""`kvcanary fleet replay` on a real Ray, of which workers, machines and the driver are killed: all is done in the end, once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from ..support.places import DATA
from ..support.raw_traces import read_raw, write_raw

RECORDINGS = 30
ENOUGH = 5  # results after which something is killed

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("traces")
    for number in range(RECORDINGS):
        header, events = read_raw(DATA / f"{'kv_flip' if number % 10 == 3 else 'clean_llama'}.arrow")
        node = made / f"node{number % 4}"
        node.mkdir(exist_ok=True)
        write_raw(node / f"{number}.arrow", replace(header, trace_id=f"{number:032x}"), events)
    (made / "node0" / "foreign.arrow").write_bytes(b"no trace")
    return made


def start(traces: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvcanary", "fleet", "replay", str(traces), "-o", str(out), "--json", *more]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def done(out: Path) -> int:
    return len(list((out / "results").glob("*.json")))


def in_the_middle(process: subprocess.Popen[str], out: Path, act: Callable[[], None]) -> None:
    while done(out) < ENOUGH:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    act()


def told(process: subprocess.Popen[str], out: Path) -> dict[str, Any]:
    """What it says at its end: all is there, once, and the rest was not stopped by what is no trace."""
    said, err = process.communicate()
    found: dict[str, Any] = json.loads(said)
    codes = [row["exit_code"] for row in found["recordings"]]
    assert (process.returncode, len(codes), codes.count(1), codes.count(2)) == (1, RECORDINGS + 1, 3, 1), err
    assert len(list((out / "table").rglob("*.parquet"))) == done(out) == RECORDINGS
    assert len(list((out / "reports").iterdir())) == 3
    assert list((out / ".scratch").iterdir()) == []
    return found


def plain(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(row.get(k) for k in ("trace", "exit_code", "violations", "row")) for row in found["recordings"]]


def tasks_of_ray(driver: int) -> list[int]:
    """The processes of the Ray that a driver has started which are at a task."""
    found, parents = [], {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if "ray::perform" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue

    def belongs(pid: int) -> bool:
        while pid > 1 and pid != driver:
            pid = parents.get(pid, 0)
        return pid == driver

    return [pid for pid in found if belongs(pid)]


@pytest.fixture(scope="module")
def expected(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    out = tmp_path_factory.mktemp("plain")
    return plain(told(start(traces, out, "--jobs", "2"), out))


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_local_ray_gives_what_processes_give(jobs: str, traces: Path, tmp_path: Path, expected: object) -> None:
    assert plain(told(start(traces, tmp_path, "--address", "local", "--jobs", jobs), tmp_path)) == expected


@pytest.mark.parametrize("kind", ["ray", "processes"])
def test_a_worker_is_killed(kind: str, traces: Path, tmp_path: Path, expected: object) -> None:
    process = start(traces, tmp_path, "--jobs", "2", *(["--address", "local"] if kind == "ray" else []))

    def kill() -> None:
        at_work: list[int] = []
        while not at_work:
            at_work = tasks_of_ray(process.pid) if kind == "ray" else _forked(process.pid)
        os.kill(at_work[0], signal.SIGKILL)

    in_the_middle(process, tmp_path, kill)
    assert plain(told(process, tmp_path)) == expected


def _forked(driver: int) -> list[int]:
    """The processes whose parent is the server that a driver has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return [pid for pid, parent in parents.items() if parents.get(parent) == driver]


@pytest.mark.parametrize("kind", ["ray", "processes"])
def test_the_driver_is_killed_and_run_again(kind: str, traces: Path, tmp_path: Path, expected: object) -> None:
    more = ["--jobs", "2", *(["--address", "local"] if kind == "ray" else [])]
    process = start(traces, tmp_path, *more)
    workers: list[int] = []

    def kill() -> None:
        workers.extend(tasks_of_ray(process.pid) if kind == "ray" else _forked(process.pid))
        process.kill()

    in_the_middle(process, tmp_path, kill)
    process.communicate()
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in workers):  # nobody is left at work
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = done(tmp_path)
    assert ENOUGH <= before < RECORDINGS
    found = told(start(traces, tmp_path, *more), tmp_path)
    assert found["already"] == before
    assert plain(found) == expected


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


def test_a_machine_of_a_cluster_is_killed(cluster: Cluster, traces: Path, tmp_path: Path, expected: object) -> None:
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    process = start(traces, tmp_path, "--address", cluster.address)
    in_the_middle(process, tmp_path, lambda: cluster.remove_node(second, allow_graceful=False))
    assert plain(told(process, tmp_path)) == expected
