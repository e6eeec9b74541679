"""`kvcanary simulate`: record a trace from the simulated engine."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import TraceError, printable
from ..process.settings import COMPRESSIONS, PRIVACIES
from .program import GivenPath, console_for, fail

if TYPE_CHECKING:
    from ..engines.simulated.config import EngineConfig
    from ..engines.simulated.engine import SimulatedEngine
    from ..engines.simulated.pd_pair import PdPair
    from ..engines.simulated.workloads import FileWorkload, RandomWorkload

_EPILOG = """\b
Examples:
  kvcanary simulate -o trace.arrow
      200 random requests through a paged pool with a prefix cache, small enough for evictions
  kvcanary simulate -o swa.arrow --shape swa --window 128 --page-size 16
      full and sliding-window layers, as Gemma or Mistral have them
  kvcanary simulate -o eagle.arrow --eagle --accept-rate 0.7
      a draft model guesses three tokens a round, the target verifies them
  kvcanary simulate --pd -o pair --failure-rate 0.05
      a prefill engine and a decode engine, KV sent between them: pair/prefill.arrow and pair/decode.arrow
  kvcanary simulate -o load.arrow --workload conversation_trace.jsonl --fraction 0.01 --page-size 64
      the first hundredth of a Mooncake trace: real arrivals, lengths and prefix sharing
  kvcanary simulate -o tight.arrow --pool-tokens 2000 --fork-rate 0.2 --abort-rate 0.1 --priorities 3
      little memory, much retraction, forks and aborts
  kvcanary-replay trace.arrow
      a clean engine must be judged clean

The same options and seed give the same events, apart from their times.
"""

_SHAPES = "mha: K and V. mla: K only. swa: full and sliding-window layers. dsv4: sliding window, K, no bytes."
_SAMPLERS = "oracle: a hash of request and position. content: equal contexts, equal tokens. random: neither."
_WORKLOADS = "Requests from a file instead: Mooncake's .jsonl or Azure's .csv."
_SEGMENTS = (
    "Begin a new file, with the whole state in it, after so many bytes of events: such a recording is replayed by several "
    "workers at once. 0: one file."
)


@click.command("simulate", epilog=_EPILOG, context_settings={"show_default": True})
@click.option("-o", "--output", required=True, type=GivenPath(), help="Trace to write; a folder with --pd.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--pd", is_flag=True, help="A prefill engine and a decode engine: prefill.arrow and decode.arrow.")
@click.option("--failure-rate", type=click.FloatRange(0, 1), default=0.0, help="Transfers that fail, with --pd.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of everything random.")
@click.option("--shape", type=click.Choice(["mha", "mla", "swa", "dsv4"]), default="mha", help=_SHAPES)
@click.option("--page-size", type=click.IntRange(min=1), default=16, help="Tokens a page.")
@click.option("--pool-tokens", type=click.IntRange(min=1), help="Slots of the pool. [default: from the workload]")
@click.option("--swa-tokens", type=click.IntRange(min=1), help="Slots of the sliding-window pool. [default: half]")
@click.option("--window", type=click.IntRange(min=1), default=128, help="Sliding window, tokens.")
@click.option("--host-tokens", type=click.IntRange(min=0), default=0, help="Slots of a host tier; 0 for none.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="Radix prefix cache.")
@click.option("--max-running", type=click.IntRange(min=1), default=16, help="Largest batch.")
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=512, help="Per prefill forward.")
@click.option("--mixed", is_flag=True, help="Decode along with prefills, in mixed forwards.")
@click.option("--graphs/--no-graphs", default=True, help="Pad decode batches to CUDA graph sizes.")
@click.option("--overlap", is_flag=True, help="Launch a forward before the host has seen the last one's tokens.")
@click.option("--sweep-interval", type=click.IntRange(min=0), default=0, help="Walk the cache every N forwards.")
@click.option("--eagle", is_flag=True, help="Speculative decoding with a draft model, top-k 1.")
@click.option("--draft-tokens", type=click.IntRange(min=1), default=3, help="Guesses a round.")
@click.option("--accept-rate", type=click.FloatRange(0, 1), default=0.6, help="Of each guess.")
@click.option("--sampler", type=click.Choice(["oracle", "content", "random"]), default="oracle", help=_SAMPLERS)
@click.option("--noise/--no-noise", default=True, help="KV bits differ from run to run, as on a GPU.")
@click.option("--requests", type=click.IntRange(min=1), help="How many. [default: 200; all of a workload file's part]")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=300, help="Mean prompt.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=100, help="Mean answer.")
@click.option("--sharing", type=click.FloatRange(0, 1), default=0.5, help="Prompts that share.")
@click.option("--arrival-rate", type=click.FloatRange(0, min_open=True), default=40.0, help="Requests a second.")
@click.option("--priorities", type=click.IntRange(min=1), default=1, help="Levels, drawn evenly.")
@click.option("--abort-rate", type=click.FloatRange(0, 1), default=0.0, help="Requests aborted on their way.")
@click.option("--fork-rate", type=click.FloatRange(0, 1), default=0.0, help="Requests that want several answers.")
@click.option("--workload", type=GivenPath(dir_okay=False), help=_WORKLOADS)
@click.option("--fraction", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Read this much of the file.")
@click.option("--scale-time", type=click.FloatRange(min=0), default=1.0, help="Multiply the file's arrival times.")
@click.option("--kv-watch-every", type=click.IntRange(min=0), default=1, help="0: never.")
@click.option(
    "--tokens",
    type=click.Choice(PRIVACIES),
    default="plain",
    help="hashed: salted hashes in their place, by a fresh salt.",
)
@click.option("--compression", type=click.Choice(COMPRESSIONS), default="lz4", help="none: fastest read, largest file.")
@click.option("--segment-bytes", type=click.IntRange(min=0), default=0, metavar="N", help=_SEGMENTS)
@click.option("--json", "as_json", is_flag=True, help="Print what happened as JSON.")
def simulate_command(  # one parameter an option
    output: Path,
    force: bool,
    pd: bool,
    failure_rate: float,
    as_json: bool,
    kv_watch_every: int,
    tokens: str,
    compression: str,
    segment_bytes: int,
    **options: Any,
) -> None:
    """Record a trace from an engine that has no model, only everything around one.

    Paged allocation, prefix cache, chunked prefill, retraction, sliding windows, speculative decoding: what happens to
    the KV cache happens, and is recorded as in a real engine.
    """
    from ..capture.privacy import Privacy, new_salt
    from ..engines.simulated.config import WorkloadError
    from ..engines.simulated.engine import SimulatedEngine
    from ..engines.simulated.pd_pair import PairSettings, PdPair

    privacy = Privacy(new_salt()) if tokens == "hashed" else None
    recording: dict[str, Any] = {"kv_watch_every": kv_watch_every, "overwrite": force, "privacy": privacy}
    recording |= {"compression": compression, "segment_bytes": segment_bytes}
    runs: SimulatedEngine | PdPair
    try:
        workload = _workload(options)
        config = _config(options, workload)
        if pd:
            settings = PairSettings(failure_rate=failure_rate)
            runs = PdPair(config, workload, output, settings=settings, **recording)
            engines: list[SimulatedEngine] = [runs.prefill, runs.decode]
        else:
            runs = SimulatedEngine(config, workload, output, **recording)
            engines = [runs]
        with runs:
            try:
                seconds = _run(runs, engines, quiet=as_json)
            except KeyboardInterrupt:
                for engine in engines:
                    engine.recorder.mark(f"interrupted: {engine.counters.finished:,} requests were finished")
                    say = f"{engine.recorder.path}: ends where it was interrupted; {engine.counters.finished:,} requests were finished"
                    click.echo(printable(say), err=True)
                raise
    except (ValueError, WorkloadError, TraceError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or output}: cannot be written: {error.strerror or error}")
    except MemoryError as error:
        advice = "less memory is needed with a smaller --pool-tokens, --max-running or --prompt-tokens"
        fail(f"{str(error) or 'no memory is left'}: {advice}")
    for engine in engines:
        if engine.unwritten:
            fail(f"{engine.recorder.path}: torn: {engine.unwritten}; make room, then run it again with --force")
    written = [_files(engine, segment_bytes) for engine in engines]
    if as_json:
        found = [_as_json(engine, seconds, files) for engine, files in zip(engines, written, strict=True)]
        click.echo(json.dumps(found[0] if not pd else {"prefill": found[0], "decode": found[1]}, indent=2))
        return
    for engine, files in zip(engines, written, strict=True):
        _show(engine, seconds, files)
    traces = [str(path) for files in written for path in files]
    click.echo(f"next    {printable(shlex.join(['kvcanary-replay', *traces]))}")


def _as_json(engine: SimulatedEngine, seconds: float, files: list[Path]) -> dict[str, Any]:
    stats, counters, path = engine.recorder.stats(), engine.counters, engine.recorder.path
    found = {"trace": str(path), "seconds": seconds, "bytes": _size(files), "simulated_seconds": engine.clock_s}
    found |= {"segments": [str(file) for file in files]} if files != [path] else {}
    found |= {"tokens_per_second": counters.tokens / seconds, "dropped_events": stats.dropped_events}
    return found | {"recorder_seconds": stats.engine_thread_ns / 1e9, "counters": asdict(counters)}


def _show(engine: SimulatedEngine, seconds: float, files: list[Path]) -> None:
    stats, counters, path = engine.recorder.stats(), engine.counters, engine.recorder.path
    cut = f"   {len(files):,} segment{'' if len(files) == 1 else 's'}" if files != [path] else ""
    click.echo(f"wrote   {printable(str(path))}   {_size(files) / 1e6:,.1f} MB{cut}   {counters.forwards:,} forwards")
    click.echo(
        f"ran     {counters.finished:,} requests finished, {counters.aborted:,} aborted   {counters.tokens:,} tokens in "
        f"{seconds:,.1f} s, {counters.tokens / seconds:,.0f} tokens/s, {stats.engine_thread_ns / 1e9:,.1f} s of it "
        "recording"
    )
    if counters.forwards:
        click.echo(f"did     {_deeds(asdict(counters))}")
    if counters.refused:
        click.echo(f"left    {counters.refused:,} requests out that no row or pool could hold; see --pool-tokens")
    if stats.dropped_events:
        events = "event" if stats.dropped_events == 1 else "events"
        click.echo(f"lost    {stats.dropped_events:,} {events}: the disk was too slow")


def _files(engine: SimulatedEngine, segment_bytes: int) -> list[Path]:
    from ..trace.files import segments_of

    path = engine.recorder.path
    # What else is called like the segments of one file is an earlier recording's.
    return segments_of(path) if segment_bytes else [path]


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _workload(options: dict[str, Any]) -> RandomWorkload | FileWorkload:
    from ..engines.simulated.workloads import FileWorkload, RandomWorkload

    if options["workload"] is not None:
        return FileWorkload(
            path=options["workload"],
            fraction=options["fraction"],
            scale_time=options["scale_time"],
            limit=options["requests"] or 0,
            seed=options["seed"],
        )
    names = "seed prompt_tokens output_tokens sharing arrival_rate priorities abort_rate fork_rate"
    longest = 4 * (options["prompt_tokens"] + options["output_tokens"])
    pool = options["pool_tokens"]
    if pool is not None:  # leaves room for the tokens that a verify forward writes ahead
        longest = max(2, min(longest, pool - options["page_size"] - options["draft_tokens"] - 1))
    return RandomWorkload(
        requests=options["requests"] or 200, max_tokens=longest, **{name: options[name] for name in names.split()}
    )


def _config(options: dict[str, Any], workload: RandomWorkload | FileWorkload) -> EngineConfig:
    """Return an engine whose rows, and, unless an option says otherwise, pool suit the workload."""
    from ..engines.simulated.config import GRAPH_BATCH_SIZES, EngineConfig
    from ..engines.simulated.workloads import RandomWorkload

    longest = workload.max_tokens if isinstance(workload, RandomWorkload) else max(2, workload.longest())
    size = options["page_size"]
    pool = options["pool_tokens"] or max(3 * longest, options["max_running"] * longest // 3)
    names = (
        "seed shape page_size window prefix_cache max_running chunk_tokens mixed eagle draft_tokens accept_rate sampler"
    )
    names += " noise overlap sweep_interval"
    return EngineConfig(
        num_pages=-(-pool // size),
        swa_num_pages=-(-(options["swa_tokens"] or 0) // size),
        host_pages=-(-options["host_tokens"] // size),
        rows=options["max_running"] + 1,
        width=longest + options["draft_tokens"] + 1,
        graph_batch_sizes=GRAPH_BATCH_SIZES if options["graphs"] else (),
        **{name: options[name] for name in names.split()},
    )


def _run(runs: SimulatedEngine | PdPair, engines: list[SimulatedEngine], *, quiet: bool) -> float:
    """Run an engine or a pair, with progress on a terminal, and return the seconds that it took."""
    err = console_for(sys.stderr)
    begin = next_s = time.perf_counter()
    if quiet or not err.is_terminal:
        runs.run()
    else:
        with err.status("simulating") as status:

            def show(_: SimulatedEngine | PdPair) -> None:
                nonlocal next_s
                if time.perf_counter() >= next_s:
                    next_s = time.perf_counter() + 0.2
                    first, last = engines[0].counters, engines[-1].counters
                    forwards, tokens = (sum(getattr(e.counters, n) for e in engines) for n in ("forwards", "tokens"))
                    status.update(
                        f"simulating   {runs.clock_s:,.0f} s   {first.requests:,} requests, {last.finished:,} finished   "
                        f"{forwards:,} forwards   {tokens:,} tokens"
                    )

            runs.run(show)
    runs.close()
    return time.perf_counter() - begin


def _deeds(counters: dict[str, int]) -> str:
    plain = {"requests", "finished", "aborted", "refused", "forwards", "target_forwards", "tokens"}
    return ", ".join(
        f"{count:,} {(name.removesuffix('s') if count == 1 else name).replace('_', ' ')}"
        for name, count in counters.items()
        if count and name not in plain
    )
