"""`make fuzz-inputs`: executes every target on changed inputs, in a process each, and keeps what does not end as documented.

    python -m tests.fuzz_inputs.run --executions 100000 [--only reader] [--engine plain]

With atheris the changes are guided by which lines of ours an input reaches; without it they are random. A finding is an
exception that is not documented, a signal, more memory than `--memory-mb`, or one input that takes more than `--seconds`.
"""

import argparse
import hashlib
import importlib.util
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ..support.places import ROOT

STATE = struct.Struct("<QQ")  # executions, bytes of the input under way, which is behind it
STATE_BYTES = 1 << 20
MAX_DEATHS = 20


def main() -> int:
    """Run all targets; return the exit code: 1 where something was found."""
    options = _options()
    if options.child:
        _Child(options).run()
        return 0
    from .targets import TARGETS

    options.out.mkdir(parents=True, exist_ok=True)
    started, total, found = time.monotonic(), 0, 0
    for target in TARGETS:
        if options.only and target.name not in options.only:
            continue
        wanted = options.executions if options.only else max(1, int(options.executions * target.share))
        begun = time.monotonic()
        executions, findings = _run_target(target.name, wanted, options)
        seconds = time.monotonic() - begun
        total, found = total + executions, found + findings
        print(
            f"{target.name:10} {executions:>10,} executions  {seconds:>8.1f} s  {executions / seconds:>8.1f} a second  "
            f"{findings} findings",
            flush=True,
        )
    print(f"{'all':10} {total:>10,} executions  {time.monotonic() - started:>8.1f} s  {found} findings", flush=True)
    return int(found > 0)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=20_000, help="in all, shared out among the targets")
    parser.add_argument(
        "--only", action="append", help="a target; may be given several times, each gets all executions"
    )
    parser.add_argument("--engine", choices=("auto", "atheris", "plain"), default="auto")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--memory-mb", type=int, default=2048, help="of a process, beyond which an input is a finding")
    parser.add_argument("--seconds", type=int, default=60, help="for one input, beyond which it is a finding")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz_inputs", help="where findings are kept")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine == "auto":
        options.engine = "atheris" if importlib.util.find_spec("atheris") else "plain"
    return options


def _run_target(name: str, wanted: int, options: Any) -> tuple[int, int]:
    """Run a target in processes, a new one where one dies; return executions and findings."""
    done, deaths = 0, 0
    before = {*options.out.glob(f"{name}-*.txt")}
    while done < wanted and deaths < MAX_DEATHS:
        state = options.out / f".{name}.state"
        state.write_bytes(bytes(STATE_BYTES))
        arguments = [
            *(sys.executable, "-m", "tests.fuzz_inputs.run", "--child", name, "--state", str(state)),
            *("--executions", str(wanted - done), "--seed", str(options.seed + done), "--engine", options.engine),
            *("--memory-mb", str(options.memory_mb), "--out", str(options.out)),
        ]
        with (options.out / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        killed = _watch(child, state, options)
        executions, data = _under_way(state)
        done += executions
        state.unlink()
        if child.returncode or killed:
            deaths += 1
            said = f"{killed or 'the process ended'}: exit status {child.returncode}"
            _keep(options.out, name, data, f"{said}\n")
            print(f"{name}: {said}; see {options.out / name}.log", flush=True)
        elif executions < wanted and not executions:
            break
    return done, len({*options.out.glob(f"{name}-*.txt")} - before)


def _watch(child: "subprocess.Popen[bytes]", state: Path, options: Any) -> str:
    """Wait for a process's end; kill it, and say why, where an input takes too long or too much."""
    last, since = -1, time.monotonic()
    limit = 2 * options.memory_mb << 20
    while child.poll() is None:
        time.sleep(0.2)
        count = _under_way(state)[0]
        if count != last:
            last, since = count, time.monotonic()
        said = ""
        if count and time.monotonic() - since > options.seconds:
            said = f"an input took more than {options.seconds} s"
        elif _resident_bytes(child.pid) > limit:
            said = f"a process took more than {limit:,} bytes"
        if said:
            child.send_signal(signal.SIGKILL)
            child.wait()
            return said
    return ""


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def _under_way(state: Path) -> tuple[int, bytes]:
    with state.open("rb") as file:
        count, size = STATE.unpack(file.read(STATE.size))
        return count, file.read(size)


def _keep(folder: Path, name: str, data: bytes, said: str) -> None:
    stem = f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    (folder / f"{stem}.input").write_bytes(data)
    (folder / f"{stem}.txt").write_text(said)


class _Child:
    """One process: one target, one input after another."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.places: set[str] = set()
        self.limit_kb = options.memory_mb << 10
        self.count = 0
        with options.state.open("r+b") as file:
            self.state = mmap.mmap(file.fileno(), STATE_BYTES)

    def run(self) -> None:
        """Execute as often as wanted; findings are kept."""
        guided = self.options.engine == "atheris"
        if guided:
            import atheris

            # What numba compiles must be as it is written, so kernels are left out.
            with atheris.instrument_imports(include=["kvcanary.recorder", "kvcanary.replayer", "kvcanary.analysis"]):
                from . import targets
        else:
            from . import targets
        with targets.own_folder() as name:
            folder = Path(name)
            target = next(one for one in targets.TARGETS if one.name == self.options.child)(folder)
            seeds = target.seeds()
            for data in seeds:
                self.execute(target, data)
            if guided:
                self._guided(target, seeds, folder)
            else:
                self._plain(target, seeds)

    def execute(self, target: Any, data: bytes) -> None:
        """Execute one input; whatever comes of it is counted, and kept where it is not documented."""
        STATE.pack_into(self.state, 0, self.count, len(data))
        self.state[STATE.size : STATE.size + len(data)] = data
        try:
            target.execute(data)
        except target.allowed:
            pass
        except Exception as error:  # noqa: BLE001  # this is what is looked for
            self._found(target.name, data, error)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak > self.limit_kb:
            self.limit_kb = peak * 5 // 4
            _keep(self.options.out, target.name, data, f"the process took {peak:,} KiB\n")
        self.count += 1
        STATE.pack_into(self.state, 0, self.count, len(data))

    def _found(self, name: str, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if str(ROOT) in frame.filename and ".venv" not in frame.filename]
        last = ours[-1] if ours else frames[-1]
        place = f"{type(error).__name__} {last.filename}:{last.lineno}"
        if place not in self.places:
            self.places.add(place)
            _keep(self.options.out, name, data, "".join(traceback.format_exception(error)))

    def _plain(self, target: Any, seeds: list[bytes]) -> None:
        rng = random.Random(self.options.seed)
        while self.count < self.options.executions:
            self.execute(target, target.mend(target.bend(rng.choice(seeds), rng), rng))

    def _guided(self, target: Any, seeds: list[bytes], folder: Path) -> None:
        import atheris

        corpus = folder / "corpus"
        corpus.mkdir()
        for number, data in enumerate(seeds):
            (corpus / str(number)).write_bytes(data)
        # What is kept from one run to the next; the process's own inputs are added to it.
        kept = self.options.out / "corpus" / target.name
        kept.mkdir(parents=True, exist_ok=True)

        def mutated(data: bytes, max_size: int, seed: int) -> bytes:
            rng = random.Random(seed)
            changed = atheris.Mutate(data, max_size) if rng.random() < 0.4 else target.bend(data, rng)
            return target.mend(changed, rng)[:max_size]

        atheris.Setup(
            [
                *(sys.argv[0], str(kept), str(corpus), f"-runs={max(1, self.options.executions - self.count)}"),
                *(f"-seed={1 + self.options.seed % (1 << 30)}", f"-max_len={target.max_bytes}", "-rss_limit_mb=0"),
                *("-timeout=100000", "-handle_segv=0", "-handle_bus=0", "-handle_abrt=0", "-handle_fpe=0"),
                *("-verbosity=0", f"-artifact_prefix={folder}/"),
            ],
            lambda data: self.execute(target, data),
            custom_mutator=mutated,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # numba's and DuckDB's threads have nothing left to do
