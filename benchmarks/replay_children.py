"""What benchmarks/replay.py measures, each in a process of its own: `python replay_children.py NAME JSON`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from trace_reading import reading_child

ROOT = Path(__file__).parents[1]
WARM_UP = ROOT / "data" / "clean_llama.arrow"
FIELDS = ("launch_tag", "slot", "position", "stored_token", "expected_token", "stored_chain_hash", "expected_aux",
          "fail_reason_bits")  # fmt: skip


def child(name: str, todo: dict[str, Any], cores: int) -> dict[str, Any]:
    """Run one of `CHILDREN` in a process of its own, on so many cores (0: all), and add its peak memory."""
    command = [sys.executable, __file__, name, json.dumps(todo)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: pin(cores))
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} of {todo} failed with {process.returncode}")
    return {**json.loads(output), "peak_bytes": usage.ru_maxrss * 1024}


def pin(cores: int) -> None:
    """Leave this process so many of its cores."""
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def replay_child(todo: dict[str, Any]) -> dict[str, Any]:
    """Replay a recording with its report; what it found as a digest, and how long it took."""
    from kvcanary.replayer.run.replay import replay, replay_joined

    settings = settings_of(todo)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder)
        replay(WARM_UP, settings=settings, report=report)
        begin, cpu = time.perf_counter(), time.process_time()
        (summary,) = replay_joined(
            [[Path(path) for path in todo["trace"]]], settings=settings, reports=[report], all_there=True
        )
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, **told(summary, report)}


def stretches_child(todo: dict[str, Any]) -> dict[str, Any]:
    """Replay a recording's segments in several workers; seconds are those of the replay, `whole` has the workers' start."""
    from kvcanary.recorder.trace.recordings import group_recordings
    from kvcanary.replayer.workers.group_replay import GroupTask, joined_results
    from kvcanary.replayer.workers.jobs import Job, plan_jobs, shared_out
    from kvcanary.replayer.workers.pool import replay_in_workers

    task = GroupTask(settings=settings_of(todo), explicit=True, all_there=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder)
        (recording,), _ = group_recordings([Path(path) for path in todo["trace"]])
        plan = plan_jobs([Job(recording=recording, report=report)])
        begin = time.perf_counter()
        plan, workers = shared_out(plan, task.settings, jobs=todo["jobs"])
        results = list(joined_results(replay_in_workers(plan, task, lambda _: None, jobs=workers), task))
        whole = time.perf_counter() - begin
        ((_, result),) = results
        if result.error:
            raise SystemExit(result.error)
        (summary,) = result.summaries
        return {"seconds": summary.seconds, "whole": whole, "workers": workers, **told(summary, report)}


def settings_of(todo: dict[str, Any]) -> Any:
    """Return how to replay; rows as stepwise replay has them, one a forward, whatever the executor."""
    from kvcanary.replayer.checks import CHECK_NAMES
    from kvcanary.replayer.run.settings import ReplaySettings

    checks = CHECK_NAMES if todo["checks"] else ()
    return ReplaySettings(executor=todo["executor"], device=todo["device"], checks=checks, merge_rows=False)


def told(summary: Any, report: Path) -> dict[str, Any]:
    """Return the counts of a replay, and a digest of all that it told."""
    import hashlib

    import pyarrow.parquet as pq

    # Those of `coverage` and `not_watched` say which checks were asked for.
    left_out = ("seconds", "report", "settings", "coverage", "not_watched")
    found = {name: value for name, value in summary.to_json().items() if name not in left_out}
    tables = [pq.read_table(report / f"{name}.parquet").to_pylist() for name in ("violations", "findings")]
    digest = hashlib.sha256(json.dumps([found, tables], sort_keys=True, default=str).encode()).hexdigest()
    counts = {name: getattr(summary, name) for name in ("tokens", "forwards", "verified", "violations", "findings")}
    return {"verdict": summary.verdict.value, "digest": digest, **counts}


def published_child(todo: dict[str, Any]) -> dict[str, Any]:
    """Step the published kernels over a trace on the GPU, and compare their rows with those of a replay on the CPU."""
    import pyarrow.parquet as pq
    import torch
    from kvcanary.replayer.run.replay import replay
    from kvcanary.replayer.run.settings import ReplaySettings
    from published_stepping import same_rows, step_published

    (path,) = map(Path, todo["trace"])
    theirs = step_published(path, device=todo["device"])
    with tempfile.TemporaryDirectory() as folder:
        settings = ReplaySettings(executor="interval", merge_rows=False, checks=())
        replay(path, settings=settings, report=Path(folder))
        table = pq.read_table(Path(folder) / "violations.parquet", columns=list(FIELDS))
    ours = np.stack([table[name].to_numpy().astype(np.int64) for name in FIELDS], axis=1)
    return {
        "same_rows": same_rows(ours, theirs.rows),
        "rows": len(theirs.rows),
        "forwards": theirs.forwards,
        "entries": theirs.entries,
        "seconds": theirs.seconds,
        "state_seconds": theirs.state_seconds,
        "gpu": torch.cuda.get_device_name(todo["device"]),
    }


CHILDREN = {
    "replay": replay_child,
    "stretches": stretches_child,
    "reading": reading_child,
    "published": published_child,
}

if __name__ == "__main__":
    print(json.dumps(CHILDREN[sys.argv[1]](json.loads(sys.argv[2]))))
