"""The canary's Triton kernels beside the published CUDA ones: same GPU, same tensors, results compared first.

    python benchmarks/kernels.py [--json] [--markdown]

Needs an NVIDIA GPU, torch, triton, and sglang 0.5.23 with what its kernels import. Every figure is a median over replays of a
captured CUDA graph; the eager figure beside it has the host's launches in it. Exits 2 when any result differs.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from kernel_floors import chain_ms, gather_ms, launch_ms
from kernel_sides import DEVICE, ROW_BYTES, Ours, Published, Scenario
from kvcanary.kernels.constants import KvHashMode
from performance_page import write_section

SHAPES = ((256, 8192), (64, 32768), (16, 4096))


def captured(run: Callable[[], None], times: int) -> Callable[[], None]:
    """Return the replay of a graph of `times` runs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def median_ms(run: Callable[[], None], budget_ms: float, times: int = 1) -> float:
    """Median time of one run, of as many as fit a budget, at least 5, each between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begin.record()
    run()
    end.record()
    end.synchronize()
    count = max(5, min(200, int(budget_ms / max(begin.elapsed_time(end), 1e-3))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    figures = sorted(begin.elapsed_time(end) for begin, end in events)
    return figures[len(figures) // 2] / times


def timed(run: Callable[[], None], budget_ms: float) -> tuple[float, float]:
    """Return (graph, eager) medians in ms; a short run is captured many times over."""
    eager = median_ms(run, budget_ms / 2)
    times = 20 if eager < 0.5 else 1
    return median_ms(captured(run, times), budget_ms, times), eager


def same_rows(ours: Any, theirs: Any) -> bool:
    """Compare violation rows as sets: theirs have no order."""
    if ours.shape != theirs.shape:
        return False
    return sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))


def differences(scenario: Scenario, ours: Ours, theirs: Published, decode: bool) -> Iterator[str]:
    """Run both once and name what is not equal: records, counters, rows of clean and of damaged buffers."""
    steps = [("write", False), ("verify", False)] + ([("write", True)] if decode else [])
    for name, of_decode in steps:
        for side in (ours, theirs):
            run = side.write(decode=of_decode) if name == "write" else side.verify()
            run()
        what = f"{'decode ' if of_decode else ''}{name}"
        if not torch.equal(ours.canary, theirs.canary):
            yield f"{what}: canary buffers"
        if not torch.equal(ours.counters, theirs.counters):
            yield f"{what}: counters {ours.counters.tolist()} and {theirs.counters.tolist()}"
        if len(ours.rows()) or len(theirs.rows()):
            yield f"{what}: {len(ours.rows())} and {len(theirs.rows())} rows on clean records"
    kept = ours.canary.clone()
    chosen = scenario.part("slots", decode=False)[:: scenario.requests * scenario.prefix // 300]
    for n, word in enumerate((0, 1, 2, 3)):
        ours.canary.view(torch.int64)[chosen[n::4], word] ^= 1 << (9 * n)
    theirs.canary.copy_(ours.canary)
    for side in (ours, theirs):
        side.verify()()
    if not len(ours.rows()) or not same_rows(ours.rows(), theirs.rows()):
        yield f"verify of damaged records: {len(ours.rows())} and {len(theirs.rows())} rows"
    for side in (ours, theirs):
        side.canary.copy_(kept)
        side.clear()


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    source = torch.randint(0, 1 << 60, (1 << 28,), device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source), 100) * 1e-3)


def bytes_ms(scenario: Scenario, work: str, bandwidth: float) -> float:
    """What the bytes that must move take at the measured bandwidth, in sectors of 32."""
    kv_bytes = (0, 32, ROW_BYTES)[scenario.mode]
    count = scenario.requests * (scenario.extend if work == "decode" else scenario.prefix)
    each = 4 + 4 + 32 if work == "plan + verify" else 3 * 8 + 32
    return 1e3 * count * (each + kv_bytes) / bandwidth


TARGETS = {
    ("plan + verify", 256, 8192): (4.5, 2.5, 1.8),
    ("write", 256, 8192): (3.0, 9.0, 50.0),
    ("write", 64, 32768): (1.0, 1.0, 80.0),
}


def measure(budget_ms: float, shapes: Any, report: Callable[[str], None]) -> dict[str, Any]:
    """Compare and time every scenario; a row that differs has no figures."""

    def timer(run: Callable[[], None]) -> float:
        return timed(run, budget_ms / 4)[0]

    bandwidth, launched = copy_bandwidth(), launch_ms(timer)
    rows, different = [], []
    for requests, prefix in shapes:
        walked = chain_ms(timer, prefix)
        for shuffled in (False, True):
            for mode in (0, 1, 2):
                decode = (requests, prefix) == (256, 8192)
                scenario = Scenario(requests, prefix, shuffled, mode, extend=int(decode))
                ours, theirs = Ours(scenario), Published(scenario)
                found = list(differences(scenario, ours, theirs, decode))
                label = f"{requests} x {prefix:,}, {'shuffled' if shuffled else 'in order'}, {KvHashMode(mode).name}"
                different += [f"{label}: {what}" for what in found]
                works = ["plan + verify", "write"] + ["decode"] * decode
                for work in [] if found else works:
                    make = {
                        "plan + verify": lambda side: side.verify(),
                        "write": lambda side: side.write(),
                        "decode": lambda side: side.write(decode=True),
                    }[work]
                    mine, mine_eager = timed(make(ours), budget_ms)
                    published, published_eager = timed(make(theirs), budget_ms)
                    floor = walked if work == "write" else launched
                    if work == "plan + verify":
                        floor = gather_ms(timer, scenario)
                    moved = bytes_ms(scenario, work, bandwidth)
                    row = {
                        "work": work,
                        "requests": requests,
                        "tokens": scenario.extend if work == "decode" else prefix,
                        "shuffled": shuffled,
                        "mode": KvHashMode(mode).name,
                        "published_ms": published,
                        "ours_ms": mine,
                        "ratio": published / mine,
                        "target": TARGETS.get((work, requests, prefix), (1.0, 1.0, 1.0))[mode],
                        "bytes_ms": moved,
                        "floor_ms": max(floor, moved),
                        "over_floor": mine / max(floor, moved),
                        "most": published / max(floor, moved),
                        "published_eager_ms": published_eager,
                        "ours_eager_ms": mine_eager,
                    }
                    rows.append(row)
                    report(json.dumps(row))
                del scenario, ours, theirs
                torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "copy_bytes_per_second": bandwidth,
        "chain_ns_per_token": walked * 1e6 / prefix,
        "rows": rows,
        "different": different,
    }


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Say which rows reach their targets, and of the others, which the measured floor itself keeps from it."""
    missed = [row for row in rows if row["ratio"] < row["target"]]
    kept = [row for row in missed if row["most"] < row["target"]]

    def names(of: list[dict[str, Any]]) -> str:
        return "; ".join(
            f"{label(row)}, {order(row)}, {row['mode']}: {row['ratio']:.2f} of {row['target']:g}, the floor allows {row['most']:.2f}"
            for row in of
        )

    lines = [f"{len(rows) - len(missed)} of {len(rows)} rows reach their target."]
    if kept:
        lines.append(f"Not reached, and the measured floor itself is slower than the target: {names(kept)}.")
    if len(kept) < len(missed):
        lines.append(f"Not reached, though the floor allows it: {names([row for row in missed if row not in kept])}.")
    return lines


def label(row: dict[str, Any]) -> str:
    """A row's work in words."""
    return f"{'write' if row['work'] == 'decode' else row['work']}, {row['requests']} x {row['tokens']:,}"


def order(row: dict[str, Any]) -> str:
    """How a row's slots lie."""
    return "shuffled" if row["shuffled"] else "in order"


def markdown(result: dict[str, Any]) -> str:
    """The table that docs/results/performance.md holds."""
    lines = [
        (
            f"`python benchmarks/kernels.py`, one {result['device']}, {result['date']}; torch {result['torch']}, triton "
            f"{result['triton']}, sglang 0.5.23."
        ),
        "Rows of 1,024 bytes, tokens checked; medians of CUDA-graph replays, eager launches beside them; all results compared first.",
        (
            f"The bytes that must move (in sectors of 32) are given at the measured copy bandwidth, "
            f"{result['copy_bytes_per_second'] / 1e12:.2f} TB/s."
        ),
        "The floor is measured in the same run (`benchmarks/kernel_floors.py`): for plan + verify a kernel that does nothing but",
        "read those bytes in that order, the fastest of several forms; for write a chain as long, in registers alone, at",
        (
            f"{result['chain_ns_per_token']:.0f} ns a token; for a step of one token an empty kernel; and never less than the bytes. "
            "What is published over the"
        ),
        "floor is the most that any kernel can reach.",
        "",
        *verdict(result["rows"]),
        "",
        (
            "| work | slots | KV hash | published ms | ours ms | times as fast | target | bytes ms | floor ms | ours / floor "
            "| published / floor | eager: published, ours |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines.extend(
        f"| {label(row)} | {order(row)} | {row['mode']} "
        f"| {row['published_ms']:.4f} | {row['ours_ms']:.4f} | {row['ratio']:.2f} | {row['target']:g} | {row['bytes_ms']:.4f} "
        f"| {row['floor_ms']:.4f} | {row['over_floor']:.2f} | {row['most']:.2f} "
        f"| {row['published_eager_ms']:.3f}, {row['ours_eager_ms']:.3f} |"
        for row in result["rows"]
    )
    return "\n".join(lines)


def main() -> int:
    """Run; 0 when all results were equal, 2 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end, and nothing else")
    parser.add_argument("--markdown", action="store_true", help="write the table into docs/results/performance.md")
    parser.add_argument("--shape", type=int, default=None, help="only one of the shapes: 0, 1 or 2 (default: all)")
    parser.add_argument("--budget-ms", type=float, default=60.0, help="time for each figure (default 60)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device: these kernels are compared on a GPU.", file=sys.stderr)
        return 2
    try:
        import sglang.kernels.ops.kv_canary.verify  # noqa: F401  # whether it can be imported at all
    except ImportError as error:
        print(f"The published kernels cannot be imported ({error}); install sglang 0.5.23.", file=sys.stderr)
        return 2
    shapes = SHAPES if arguments.shape is None else SHAPES[arguments.shape : arguments.shape + 1]
    result = measure(arguments.budget_ms, shapes, lambda line: None if arguments.json else print(line, flush=True))
    print(json.dumps(result) if arguments.json else "\n" + markdown(result))
    if result["different"]:
        print("\n".join(["Results differ; no ratio is given for these:", *result["different"]]), file=sys.stderr)
        return 2
    if arguments.markdown:
        write_section("kernels", markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
