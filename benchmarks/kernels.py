"""The canary's Triton kernels beside the published CUDA ones: same GPU, same tensors, results compared first.

    python benchmarks/kernels.py [--json] [--markdown docs/performance.md]

Needs an NVIDIA GPU, torch, triton, and sglang 0.5.23 with what its kernels import. Every figure is a median over replays of a
captured CUDA graph; the eager figure beside it has the host's launches in it. Exits 2 when any result differs.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.fused import CanaryBuffer, plan_verify, write_shared
from kvcanary.kernels.gpu.hashing import hash_chain
from kvcanary.kernels.kv_source import KvSource
from kvcanary.kernels.plan import WritePlan
from kvcanary.kernels.records import ViolationLog

DEVICE = torch.device("cuda")
ROW_BYTES = 1024
TAG = 2
SHAPES = ((256, 8192), (64, 32768), (16, 4096))
BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"


@triton.jit
def _chain_kernel(out, steps):
    """Nothing but a chain's serial part, in registers."""
    running = tl.load(out).to(tl.uint64, bitcast=True)
    for i in range(0, steps, 8):
        for k in tl.static_range(8):
            running = hash_chain(running, running * 0 + (i + k), running * 0 + (i + k))
    tl.store(out, running.to(tl.int64, bitcast=True))


@dataclass(slots=True)
class Scenario:
    """One shape, order of slots and KV hash mode: tensors that both sides read, and each side's own to write to."""

    requests: int
    prefix: int
    shuffled: bool
    mode: int
    extend: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Allocate and fill."""
        requests, width = self.requests, self.prefix + self.extend
        count = requests * width
        generator = torch.Generator(DEVICE).manual_seed(7)
        if self.shuffled:
            slots = torch.randperm(count, device=DEVICE, generator=generator) + 1
        else:
            slots = torch.arange(1, count + 1, device=DEVICE)
        slots = slots.view(requests, width)
        table = torch.zeros(requests + 1, (width + 15) // 8 * 8, dtype=torch.int32, device=DEVICE)
        table[1:, :width] = slots.int()
        tokens = torch.randint(0, 150_000, (requests, width), device=DEVICE, generator=generator)
        truth = torch.zeros_like(table)
        truth[1:, :width] = tokens.int()
        kv = torch.randint(0, 256, (count + 1, ROW_BYTES), dtype=torch.uint8, device=DEVICE, generator=generator)
        whole = torch.full((requests,), self.prefix, dtype=torch.int64, device=DEVICE)
        positions = torch.arange(width, device=DEVICE).expand(requests, width)
        self.state = {
            "slots": slots,
            "table": table,
            "truth": truth,
            "tokens": tokens,
            "kv": kv,
            "rows": torch.arange(1, requests + 1, device=DEVICE),
            "prefix_lens": whole,
            "zeros": torch.zeros_like(whole),
            "positions": positions,
            "count": count,
        }

    def part(self, name: str, decode: bool) -> Any:
        """The tokens of the prefix, or those after it, flat."""
        value = self.state[name]
        return (value[:, self.prefix :] if decode else value[:, : self.prefix]).contiguous().view(-1)


class Ours:
    """This project's kernels on a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, state = scenario, scenario.state
        self.canary = torch.zeros(state["count"] + 1, 32, dtype=torch.uint8, device=DEVICE)
        self.log = ViolationLog.allocate(4096, device=DEVICE)
        self.counters = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
        self.lost = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        source = KvSource(tensor=state["kv"], page_size=1, bytes_per_token=ROW_BYTES, read_bytes=ROW_BYTES)
        self.buffer = CanaryBuffer(
            canary=self.canary,
            tag=TAG,
            sources=(source,),
            kv_hash_mode=KvHashMode(scenario.mode),
            violations=self.log,
            slot_counter=self.counters[0],
            kernel_counter=self.counters[1],
        )

    def verify(self) -> Callable[[], None]:
        """Return a launch of plan and verify."""
        state = self.scenario.state
        return lambda: plan_verify(
            req_pool_indices=state["rows"],
            prefix_lens=state["prefix_lens"],
            req_to_token=state["table"],
            window=0,
            full_to_swa=None,
            truth_tokens=state["truth"],
            truth_lens=state["prefix_lens"],
            token_offset=0,
            check_tokens=True,
            buffers=(self.buffer,),
            out_of_range=self.lost,
            backend="triton",
        )

    def write(self, *, decode: bool = False) -> Callable[[], None]:
        """Return a launch of write: the prefixes, or with `decode` the tokens after them."""
        scenario, state = self.scenario, self.scenario.state
        each = scenario.extend if decode else scenario.prefix
        plan = WritePlan.allocate(request_capacity=scenario.requests, device=DEVICE)
        plan.offsets.copy_(torch.arange(scenario.requests + 1, device=DEVICE) * each)
        if decode:
            plan.seed_slots.copy_(state["slots"][:, scenario.prefix - 1])
        plan.num_valid_reqs.fill_(scenario.requests)
        slots, tokens, positions = (scenario.part(name, decode) for name in ("slots", "tokens", "positions"))
        return lambda: write_shared(
            plan=plan,
            input_ids=tokens,
            positions=positions,
            out_cache_loc=slots,
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=True,
            buffers=(self.buffer,),
            backend="triton",
        )

    def rows(self) -> Any:
        """The violation rows so far."""
        return self.log.rows[: int(self.log.write_index)]

    def clear(self) -> None:
        """Forget the violation rows."""
        self.log.clear()


class Published:
    """sglang's kernels on the same scenario."""

    def __init__(self, scenario: Scenario) -> None:
        from sglang.kernels.ops.kv_canary import consts, plan, verify, write

        self.scenario, state = scenario, scenario.state
        self._plan, self._verify, self._write = plan.launch_canary_plan_kernels, verify, write
        self.canary = torch.zeros(state["count"] + 1, 32, dtype=torch.uint8, device=DEVICE)
        self.ring = torch.zeros(4096, 8, dtype=torch.int64, device=DEVICE)
        self.index = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.counters = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
        sources = ()
        if scenario.mode:
            read = 16 if scenario.mode == 1 else ROW_BYTES
            sources = (
                verify.RealKvSource(tensor=state["kv"], page_size=1, num_bytes_per_token=ROW_BYTES, read_bytes=read),
            )
        self.context = verify.VerifyOrWriteContext(
            canary_buf=self.canary,
            kernel_kind=verify.CanaryLaunchTag(TAG),
            violation_ring=self.ring,
            violation_write_index=self.index,
            slot_run_counter=self.counters[0],
            kernel_run_counter=self.counters[1],
            real_kv_sources=sources,
            real_kv_hash_mode=consts.RealKvHashMode(scenario.mode),
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=DEVICE),
        )

    def verify(self) -> Callable[[], None]:
        """Return a launch of plan and verify."""
        scenario, state = self.scenario, self.scenario.state
        capacity = scenario.requests * scenario.prefix + 64
        verify_plan = self._verify.VerifyPlan.allocate(verify_capacity=capacity, device=DEVICE)
        write_plan = self._write.WritePlan.allocate(write_req_capacity=scenario.requests, device=DEVICE)

        def run() -> None:
            self._plan(
                verify_plan_out=verify_plan,
                write_plan_out=write_plan,
                req_pool_indices=state["rows"],
                prefix_lens=state["prefix_lens"],
                extend_seq_lens=state["zeros"],
                req_to_token=state["table"],
                swa_window_size=0,
                full_to_swa_index_mapping=None,
                verify_capacity=capacity,
                req_to_verify_expected_tokens=state["truth"],
                req_to_verify_expected_tokens_valid_lens=state["prefix_lens"],
                kv_token_id_vs_position_offset=0,
            )
            self._verify.launch_canary_verify_kernel(
                context=self.context, plan=verify_plan, check_verify_expected_token=True
            )

        return run

    def write(self, *, decode: bool = False) -> Callable[[], None]:
        """Return a launch of write: the prefixes, or with `decode` the tokens after them."""
        scenario, state = self.scenario, self.scenario.state
        each = scenario.extend if decode else scenario.prefix
        plan = self._write.WritePlan.allocate(write_req_capacity=scenario.requests, device=DEVICE)
        plan.write_offsets.copy_(torch.arange(scenario.requests + 1, device=DEVICE) * each)
        plan.write_seed_slot_indices.fill_(-1)
        if decode:
            plan.write_seed_slot_indices.copy_(state["slots"][:, scenario.prefix - 1])
        plan.write_num_valid_reqs.fill_(scenario.requests)
        slots, tokens, positions = (scenario.part(name, decode) for name in ("slots", "tokens", "positions"))
        return lambda: self._write.launch_canary_write_kernel(
            context=self.context,
            plan=plan,
            input_ids=tokens,
            positions=positions,
            out_cache_loc=slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    def rows(self) -> Any:
        """The violation rows so far."""
        return self.ring[: int(self.index)]

    def clear(self) -> None:
        """Forget the violation rows."""
        self.index.zero_()


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


def chain_latency() -> float:
    """Seconds a token of a chain's serial part takes."""
    out = torch.ones(1, dtype=torch.int64, device=DEVICE)

    def steps(count: int) -> float:
        return median_ms(lambda: _chain_kernel[(1,)](out, count, num_warps=1), 20)

    return (steps(40_000) - steps(20_000)) * 1e-3 / 20_000


def floor_ms(scenario: Scenario, work: str, bandwidth: float, latency: float) -> float:
    """The time below which no kernel gets: bytes that must move, in sectors of 32, or the longest chain."""
    kv_bytes = (0, 32, ROW_BYTES)[scenario.mode]
    each = scenario.extend if work == "decode" else scenario.prefix
    count = scenario.requests * each
    if work == "plan + verify":
        return 1e3 * count * (4 + 4 + 32 + kv_bytes) / bandwidth
    return 1e3 * max(count * (3 * 8 + 32 + kv_bytes) / bandwidth, each * latency)


TARGETS = {
    ("plan + verify", 256, 8192): (4.5, 2.5, 1.8),
    ("write", 256, 8192): (3.0, 9.0, 50.0),
    ("write", 64, 32768): (1.0, 1.0, 80.0),
}


def measure(budget_ms: float, shapes: Any, report: Callable[[str], None]) -> dict[str, Any]:
    """Compare and time every scenario; a row that differs has no figures."""
    bandwidth, latency = copy_bandwidth(), chain_latency()
    rows, different = [], []
    for requests, prefix in shapes:
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
                    floor = floor_ms(scenario, work, bandwidth, latency)
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
                        "floor_ms": floor,
                        "over_floor": mine / floor,
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
        "chain_seconds_per_token": latency,
        "rows": rows,
        "different": different,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table that docs/performance.md holds."""
    lines = [
        (
            f"`python benchmarks/kernels.py`, one {result['device']}, {result['date']}; torch {result['torch']}, triton "
            f"{result['triton']}, sglang 0.5.23. Rows of 1,024 bytes, tokens checked; medians of CUDA-graph replays, eager launches"
        ),
        "beside them; all results compared first. The floor is what the bytes (in sectors of 32) take at the measured copy",
        (
            f"bandwidth, {result['copy_bytes_per_second'] / 1e12:.2f} TB/s, or the longest chain at "
            f"{result['chain_seconds_per_token'] * 1e9:.0f} ns a token, measured in registers alone."
        ),
        "",
        "| work | slots | KV hash | published ms | ours ms | times as fast | target | floor ms | ours / floor | eager: published, ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        work = "write" if row["work"] == "decode" else row["work"]
        lines.append(
            f"| {work}, {row['requests']} x {row['tokens']:,} | {'shuffled' if row['shuffled'] else 'in order'} | {row['mode']} "
            f"| {row['published_ms']:.4f} | {row['ours_ms']:.4f} | {row['ratio']:.2f} | {row['target']:g} "
            f"| {row['floor_ms']:.4f} | {row['over_floor']:.2f} | {row['published_eager_ms']:.3f}, {row['ours_eager_ms']:.3f} |"
        )
    return "\n".join(lines)


def put_between_markers(path: Path, table: str) -> None:
    """Write the table into a file, between its markers."""
    text = path.read_text() if path.exists() else f"# Performance\n\n## Kernels\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{path} lacks the lines {BEGIN} and {END}, between which the table goes")
    before, rest = text.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}")


def main() -> int:
    """Run; 0 when all results were equal, 2 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end, and nothing else")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help=f"write the table into FILE between {BEGIN} and {END}"
    )
    parser.add_argument("--budget-ms", type=float, default=60.0, help="time for each figure (default 60)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device: these kernels are compared on a GPU.", file=sys.stderr)
        return 2
    try:
        import sglang.kernels.ops.kv_canary.verify  # noqa: F401
    except ImportError as error:
        print(f"The published kernels cannot be imported ({error}); install sglang 0.5.23.", file=sys.stderr)
        return 2
    result = measure(arguments.budget_ms, SHAPES, lambda line: None if arguments.json else print(line, flush=True))
    print(json.dumps(result) if arguments.json else "\n" + markdown(result))
    if result["different"]:
        print("\n".join(["Results differ; no ratio is given for these:", *result["different"]]), file=sys.stderr)
        return 2
    if arguments.markdown:
        put_between_markers(arguments.markdown, markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
