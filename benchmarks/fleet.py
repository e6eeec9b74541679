"""Measure `kvcanary fleet replay`: what a recording costs beside its replay, and how many workers help.

    python benchmarks/fleet.py overhead [--count 10000] [--jobs 2] [--address local] [--json]
    python benchmarks/fleet.py scaling --jobs 1,2,4,8,16 [--each 8] [--workload mooncake.jsonl --fraction 0.01] [--address local]

overhead: recordings of some forwards each. A tenth of them and all of them are replayed, so that what starting costs is apart;
the CPU time of all processes, Ray's too, for each further recording is compared with that of a bare replay of the same recordings
in one process, without report or table. scaling: so many recordings for each worker, and as many cores as workers: the efficiency
is the throughput, the start included, against as many times that of the first. Runs differ in nothing else. What the machine itself
gives is measured beside it: processes that share nothing but its cores, caches and memory do arithmetic, copy memory, and replay
the same recordings. The exit status is 2 if verdicts are not what they must be, 1 if the target of 20 ms is missed, or of 85 %
of what those replays reach.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvcanary.recorder.trace.checksum import text_crc32c
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.trace.schema import HEADER_CRC_KEY, HEADER_KEY
from making_traces import make_trace, tell
from programs import program

TARGET_OVERHEAD_MS = 20.0
TARGET_EFFICIENCY = 0.85
BARE = 300
NODES = 50
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "scaling", "bare", "alone"])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--jobs", default="2", help="workers; for scaling several, joined by commas")
    parser.add_argument("--each", type=int, default=8, help="recordings for each worker")
    parser.add_argument("--workload", type=Path, help="Mooncake's requests; else some that are random")
    parser.add_argument("--fraction", type=float, default=0.01)
    parser.add_argument("--address", default="", help="with Ray")
    parser.add_argument("--work", type=Path, help="where recordings are made; else a folder that goes again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.what == "bare":
        print(json.dumps(bare(options.work)))
        return 0
    if options.what == "alone":
        alone()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        found, missed = (overhead if options.what == "overhead" else scaling)(options, work)
    print(
        json.dumps(found, indent=2)
        if options.json
        else "\n".join(f"{name:34} {value}" for name, value in found.items())
    )
    return missed


def overhead(options: argparse.Namespace, work: Path) -> tuple[dict[str, Any], int]:
    """Return the figures, and the exit status."""
    small = simulated(work / "small.arrow", "--requests", "3", "--prompt-tokens", "30", "--output-tokens", "4")
    runs = []
    for count in (options.count // 10, options.count):
        shutil.rmtree(work / f"copies-{count}", ignore_errors=True)
        traces = copies(small, count, work / f"copies-{count}")
        runs.append(fleet(traces, work, int(options.jobs), options.address) | {"count": count})
        tell(str(runs[-1]))
    alone = json.loads(subprocess.check_output([sys.executable, __file__, "bare", "--work", str(traces)]))
    few, many = runs
    more = many["count"] - few["count"]
    each = {name: (many[name] - few[name]) / more for name in ("cpu_s", "driver_cpu_s", "driver_bytes", "wall_s")}
    figure = 1e3 * each["cpu_s"] - alone["cpu_ms"]
    found = {
        "recordings": many["count"],
        "bytes of each": small.stat().st_size,
        "workers": f"{options.jobs}{f', Ray {options.address}' if options.address else ', processes'}",
        "bare replay, CPU ms": round(alone["cpu_ms"], 2),
        "with all, CPU ms": round(1e3 * each["cpu_s"], 2),
        "overhead, CPU ms": round(figure, 2),
        "of it in the driver, CPU ms": round(1e3 * each["driver_cpu_s"], 2),
        "wall ms": round(1e3 * each["wall_s"], 2),
        "driver, bytes of each": round(each["driver_bytes"]),
        "driver at all of them, MiB": round(many["driver_bytes"] / 2**20),
        "CPU s to start": round(few["cpu_s"] - few["count"] * each["cpu_s"], 1),
    }
    return found, int(figure > TARGET_OVERHEAD_MS)


def scaling(options: argparse.Namespace, work: Path) -> tuple[dict[str, Any], int]:
    """Return the figures, and the exit status."""
    if options.workload:
        [source] = make_trace(options.workload, work, options.fraction)
    else:
        source = simulated(work / "one.arrow", "--requests", "400")
    numbers = sorted(int(one) for one in options.jobs.split(","))
    shutil.rmtree(work / "copies", ignore_errors=True)
    found: dict[str, Any] = {"bytes of each": source.stat().st_size, "recordings for each worker": options.each}
    found |= machine()
    firsts: dict[str, float] = {}
    missed = 0
    for jobs in numbers:
        traces = copies(source, jobs * options.each, work / "copies")
        os.sync()  # nothing is still being written
        for path in sorted(traces.glob("*/*.arrow")):
            path.read_bytes()  # and all is in memory, if that is large enough
        if jobs == numbers[0]:
            fleet(traces, work, jobs, options.address, cores=jobs)  # it compiles
        run = fleet(traces, work, jobs, options.address, cores=jobs)
        rates = ceiling(traces, jobs, options.each)
        rates["fleet"] = jobs * options.each / run["wall_s"]
        firsts = firsts or rates
        shares = {name: rate / (firsts[name] * jobs / numbers[0]) for name, rate in rates.items()}
        missed |= shares["fleet"] < TARGET_EFFICIENCY * min(1, shares["replay"])
        found[f"{jobs} workers"] = ", ".join(
            [f"{run['wall_s']:.1f} s", f"{rates['fleet']:.2f} a second", "of the first, times as many:"]
            + [f"{name} {share:.0%}" for name, share in shares.items()]
            + [f"the fleet beside bare replays {rates['fleet'] / rates['replay']:.0%}", phases(run, jobs, options.each)]
        )
        tell(f"{jobs}: {found[f'{jobs} workers']}")
    return found, int(missed)


def phases(run: dict[str, Any], jobs: int, each: int) -> str:
    """Say where a run's time went."""
    work = run["work"]
    told = [f"start {run['wall_s'] - work['tasks_seconds']:.1f} s"]
    if "busy_seconds" in work:
        busy = work["busy_seconds"]
        told += [f"workers busy {busy / jobs / work['tasks_seconds']:.0%} of {work['tasks_seconds']:.1f} s"]
        told += [
            f"{work['most_at_once']} at once, and beside the replay {(busy - work['replay_seconds']) / jobs / each:.2f} s each"
        ]
    told += [f"replay {work['replay_seconds'] / jobs / each:.2f} s and CPU {run['cpu_s'] / jobs / each:.2f} s each"]
    told += [f"driver's CPU {run['driver_cpu_s']:.1f} s"]
    told += [f"{run['available'] / 2**30:.0f} of {run['total'] / 2**30:.0f} GiB free before"]
    spent = run["machine"]
    told += [f"disk {spent['read'] / 1e9:.1f} GB read, {spent['written'] / 1e9:.1f} GB written"]
    names = ("user", "system", "iowait", "steal")
    return "; ".join([*told, "the machine's CPUs " + ", ".join(f"{name} {spent[name]:.0f} s" for name in names)])


def machine() -> dict[str, str]:
    """Return what the cores are of which workers get some."""
    fields = dict(
        line.split(":", 1) for line in subprocess.check_output(["lscpu"], text=True).splitlines() if ":" in line
    )
    names = (
        "Model name",
        "CPU(s)",
        "Thread(s) per core",
        "Core(s) per socket",
        "Socket(s)",
        "NUMA node(s)",
        "L3 cache",
    )
    said = {name: fields[name].strip() for name in names if name in fields}
    siblings = {
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    }
    return {"machine": ", ".join(f"{name} {one}" for name, one in said.items()), "siblings": " ".join(sorted(siblings))}


def ceiling(traces: Path, jobs: int, each: int) -> dict[str, float]:
    """Return how much so many processes that share nothing do a second, on the cores that so many workers get.

    `arithmetic` is what fits into a core, `copying` goes through memory, `replay` is that of the recordings and nothing else.
    """
    pin = functools.partial(os.sched_setaffinity, 0, sorted(os.sched_getaffinity(0))[:jobs])
    paths = sorted(traces.glob("*/*.arrow"))[: jobs * each]
    command = [sys.executable, __file__, "alone", "--work", str(traces)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=pin)
        for _ in range(jobs)
    ]
    rates = {}
    for what in ("arithmetic", "copying", "replay"):
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready
        begin = time.perf_counter()
        for number, process in enumerate(processes):
            assert process.stdin is not None
            mine = [str(path) for path in paths[number::jobs]] if what == "replay" else []
            process.stdin.write(json.dumps([what, mine]) + "\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it is done
        rates[what] = jobs * (each if what == "replay" else 1) / (time.perf_counter() - begin)
    for process in processes:
        process.communicate()
    return rates


def alone() -> None:
    """Do what comes, as one of several processes that do the same at once."""
    import numpy as np
    from kvcanary.recorder.trace.recordings import group_recordings
    from kvcanary.replayer.executors.incremental.compiled_pass import compile_pass
    from kvcanary.replayer.run.settings import ReplaySettings
    from kvcanary.replayer.workers.group_replay import GroupTask, replay_group
    from kvcanary.replayer.workers.jobs import Job
    from kvcanary.replayer.workers.worker import load

    load(1)
    compile_pass(1 << 40)
    task = GroupTask(settings=ReplaySettings(), explicit=True, all_there=True)
    print("ready", flush=True)
    for line in sys.stdin:
        what, paths = json.loads(line)
        if what == "arithmetic":
            number = 1
            for _ in range(10_000_000):
                number = number * 1664525 + 1013904223 & 0xFFFFFFFF
        elif what == "copying":
            source, target = np.ones(1 << 25, np.uint64), np.ones(1 << 25, np.uint64)
            for _ in range(20):
                np.copyto(target, source)
            del source, target
        else:
            for recording in group_recordings([Path(path) for path in paths])[0]:
                result = replay_group([Job(recording=recording)], task)
                assert not result.error, result.error
        print("done", flush=True)
        print("ready", flush=True)


def simulated(path: Path, *how: str) -> Path:
    """Record an engine of the simulator."""
    subprocess.check_output([*program("kvcanary"), "simulate", "-o", str(path), "--force", "--seed", "1", *how])
    return path


def copies(source: Path, count: int, folder: Path) -> Path:
    """Fill a folder with recordings that are the same but for their ids, in folders of several servers; what is there stays."""
    data = source.read_bytes()
    with TraceReader(source) as reader:
        text, crc = (reader.schema.metadata[key] for key in (HEADER_KEY, HEADER_CRC_KEY))
        old = reader.header.trace_id.encode()
    made = number = 0
    while made < count:
        number += 1
        mine = uuid.UUID(int=number).hex.encode()
        new = b"%d" % text_crc32c(text.replace(old, mine))
        if len(new) == len(crc):  # so that nothing moves
            place = folder / f"node{made % NODES:02d}"
            place.mkdir(parents=True, exist_ok=True)
            if not (place / f"{made:06d}.arrow").exists():
                (place / f"{made:06d}.arrow").write_bytes(data.replace(old, mine).replace(crc, new))
            made += 1
    return folder


def fleet(traces: Path, work: Path, jobs: int, address: str, cores: int = 0) -> dict[str, Any]:
    """Replay a folder; return seconds, CPU seconds of all processes and of the driver, and the driver's peak memory."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [*program("kvcanary"), "fleet", "replay", str(traces), "-o", str(out), "--json", "--jobs", str(jobs)]
    command += ["--address", address] if address else []
    allowed = sorted(os.sched_getaffinity(0))
    if cores > len(allowed):
        raise SystemExit(f"{cores} workers need as many cores; this machine has {len(allowed)}")
    before, spent = meminfo(), counters()
    begin = time.perf_counter()
    with (work / "told.json").open("wb") as told:
        pin = (lambda: os.sched_setaffinity(0, allowed[:cores])) if cores else None
        process = subprocess.Popen(
            command, stdout=told, preexec_fn=pin, env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        )
    seen: dict[int, float] = {}
    peak = 0
    while process.poll() is None:
        seen |= cpu_below(process.pid)
        peak = max(peak, memory(process.pid))
        time.sleep(0.1)
    wall = time.perf_counter() - begin
    machine_figures = {name: figure - spent[name] for name, figure in counters().items()}
    said = json.loads((work / "told.json").read_text())
    verdicts = {row["exit_code"] for row in said["recordings"]}
    if verdicts != {0}:
        print(f"verdicts are {verdicts}, expected {{0}}", file=sys.stderr)
        raise SystemExit(2)
    figures = {"wall_s": wall, "cpu_s": sum(seen.values()), "driver_cpu_s": seen[process.pid], "driver_bytes": peak}
    figures |= {"machine": machine_figures, "total": before["MemTotal"], "available": before["MemAvailable"]}
    return figures | {"work": said["work"]}


def counters() -> dict[str, float]:
    """Return what all CPUs spent since the machine began, in seconds, and the bytes that disks have read and written."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    found = {name: int(one) / TICKS for name, one in zip(names, ticks, strict=False)}
    pages = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return found | {"read": 1024 * int(pages["pgpgin"]), "written": 1024 * int(pages["pgpgout"])}


def meminfo() -> dict[str, int]:
    """Return what the machine says of its memory, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def cpu_below(top: int) -> dict[int, float]:
    """Return the CPU seconds of a process and of all below it."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        used[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    inside, before = {top}, 0
    while len(inside) > before:
        before = len(inside)
        inside |= {pid for pid, parent in parents.items() if parent in inside}
    return {pid: used[pid] for pid in inside if pid in used}


def memory(pid: int) -> int:
    """Return a process's peak memory."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def bare(folder: Path) -> dict[str, float]:
    """Replay some recordings one after another in this process, and nothing else; return CPU milliseconds of each."""
    from kvcanary.recorder.trace.recordings import group_recordings
    from kvcanary.replayer.run.settings import ReplaySettings
    from kvcanary.replayer.workers.group_replay import GroupTask, replay_group
    from kvcanary.replayer.workers.jobs import Job
    from kvcanary.replayer.workers.worker import load

    load(1)
    recordings = group_recordings(sorted(folder.glob("*/*.arrow"))[:BARE])[0]
    task = GroupTask(settings=ReplaySettings(), explicit=True, all_there=True)
    at = []
    for recording in recordings:
        at.append(time.process_time())
        replay_group([Job(recording=recording)], task)
    times = [1e3 * (after - before) for before, after in pairwise(at)][len(at) // 10 :]
    return {"cpu_ms": sum(times) / len(times)}


if __name__ == "__main__":
    sys.exit(main())
