"""Measure the simulated engine, shape by shape: tokens a second recorded, and against the same run without a recorder.

    python benchmarks/simulated_engine.py [--tokens 60000] [--shapes mha,swa-1] [--workload FILE.jsonl] [--json]
    python benchmarks/simulated_engine.py --tokens 4000000 --shapes mha     # peak memory of a long run

Each shape runs twice in this process, recorded and not, over the same workload; both must have computed the same
tokens, or no ratio is printed and the exit status is 2. It is 1 where a shape records less than the target. Tokens are
those that target forwards compute; a second is one of the whole process's CPU time, the writer's thread included, so
that other work on the machine does not count; tokens a second of wall time stand beside it.
"""

import argparse
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcanary.recorder.engines.simulated.config import Counters, EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.memory import Sweeper
from kvcanary.recorder.engines.simulated.requests import RequestSpec
from kvcanary.recorder.engines.simulated.runner import ForwardRunner, Model
from kvcanary.recorder.engines.simulated.workloads import FileWorkload, RandomWorkload

TARGET_TOKENS_PER_SECOND = 20_000
WARM_UP_TOKENS = 3000

SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"page_size": 16},
    "mha-1": {"page_size": 1},
    "mla": {"page_size": 16, "shape": "mla"},
    "swa": {"page_size": 16, "shape": "swa"},
    "swa-1": {"page_size": 1, "shape": "swa"},
    "dsv4": {"page_size": 16, "shape": "dsv4"},
    "eagle": {"page_size": 16, "eagle": True},
    "eagle-1": {"page_size": 1, "eagle": True},
    "overlap": {"page_size": 16, "overlap": True},
    "sweeps": {"page_size": 16, "sweep_interval": 50},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one shape came to; `ratio` is the CPU time with a recorder over that without."""

    shape: str
    tokens: int
    tokens_per_cpu_second: float
    tokens_per_wall_second: float
    recorder_ratio: float
    bytes_per_token: float


class Unrecorded:
    """Stands where a recorder stands, and does nothing."""

    def __init__(self) -> None:
        self.next_forward = 0

    def __getattr__(self, name: str) -> Any:
        return self._nothing

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Take whatever is told."""


class UnrecordedEngine(SimulatedEngine):
    """The same engine, telling nobody."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder.close()
        nobody: Any = Unrecorded()
        self.recorder = self.history.recorder = nobody
        self.runner = ForwardRunner(nobody, self.memory, Model(self.config, self.memory), self.counters)
        self.sweeper = Sweeper(nobody, self.memory)


def main() -> int:
    """Run the shapes that were asked for and print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30_000, help="computed in each run")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which of them, with commas")
    parser.add_argument("--workload", type=Path, help="a Mooncake .jsonl instead of random requests")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for shape in args.shapes.split(","):
        if shape not in SHAPES:
            parser.error(f"shape is {shape!r}, expected some of {', '.join(SHAPES)}")
        row = measure(shape, args.tokens, args.workload)
        if row is None:
            print(f"{shape}: the runs with and without a recorder differ; no ratio", file=sys.stderr)
            return 2
        rows.append(row)
        if not args.json:
            print_row(row, first=len(rows) == 1)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "peak_mib": peak_mib}, indent=2))
    else:
        print(f"peak memory of all runs in this process   {peak_mib:,.0f} MiB")
    return int(any(row.tokens_per_cpu_second < TARGET_TOKENS_PER_SECOND for row in rows))


def measure(shape: str, tokens: int, workload: Path | None) -> Row | None:
    """Run one shape with and without a recorder; None where the two did not compute the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.arrow"
        run(SimulatedEngine, shape, WARM_UP_TOKENS, workload, path)
        plain, plain_cpu_s, _ = run(UnrecordedEngine, shape, tokens, workload, path)
        recorded, cpu_s, wall_s = run(SimulatedEngine, shape, tokens, workload, path)
        if recorded != plain:
            return None
        return Row(
            shape=shape,
            tokens=recorded.tokens,
            tokens_per_cpu_second=recorded.tokens / cpu_s,
            tokens_per_wall_second=recorded.tokens / wall_s,
            recorder_ratio=cpu_s / plain_cpu_s,
            bytes_per_token=path.stat().st_size / recorded.tokens,
        )


def run(
    kind: type[SimulatedEngine], shape: str, tokens: int, workload: Path | None, path: Path
) -> tuple[Counters, float, float]:
    """Return what an engine did until it had computed so many tokens, and its seconds of CPU and of wall time."""
    specs, longest = requests(workload)
    config = EngineConfig(
        **SHAPES[shape],
        num_pages=max(3 * longest, 16 * longest // 3) // SHAPES[shape]["page_size"] + 1,
        window=128,
        rows=17,
        width=longest + 8,
        max_running=16,
        chunk_tokens=512,
    )
    with kind(config, specs, path, overwrite=True) as engine:
        cpu, wall = time.process_time(), time.perf_counter()
        while engine.counters.tokens < tokens and engine.step():
            pass
        engine.drain()
        engine.close()
        return engine.counters, time.process_time() - cpu, time.perf_counter() - wall


def requests(workload: Path | None) -> tuple[Iterator[RequestSpec], int]:
    """Return requests without end, or those of a file over and over, and the longest one's tokens."""
    if workload is None:
        source = RandomWorkload(requests=1_000_000, prompt_tokens=1000, output_tokens=200, max_tokens=4800)
        return iter(source), 4800
    file = FileWorkload(path=workload, fraction=0.01)
    return itertools.chain.from_iterable(itertools.repeat(file)), file.longest()


def print_row(row: Row, *, first: bool) -> None:
    """Print one line of the table, under its head where it is the first."""
    if first:
        print("shape        tokens   tokens/s of CPU   tokens/s of wall   recorder on / off   bytes/token")
    print(
        f"{row.shape:9} {row.tokens:9,} {row.tokens_per_cpu_second:17,.0f} {row.tokens_per_wall_second:18,.0f} "
        f"{row.recorder_ratio:19.2f} {row.bytes_per_token:13.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
