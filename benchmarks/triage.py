"""Measure triage: every canned query over many token rows and violations, and the same in plain Polars and in pandas.

    python benchmarks/triage.py [--tokens 2000000] [--violations 200000] [--folder DIR] [--threads 2] [--json]
    python benchmarks/triage.py --tokens 100000000 --violations 10000000 --folder /big/disk --without pandas

Makes a trace (requests prefilled in chunks and decoded in batches) and a report with damage in it, or takes those that
an earlier run left in DIR, then builds report.duckdb and asks. Each engine runs in a process of its own, so that its
peak memory is its own (pandas only where it is installed); the others read Parquet files with the same rows. A ratio is printed where the results are
equal; where they are not, that is said instead and the exit status is 2. It is 1 where a canned query takes longer than
the target, or memory does. Times are the best of three.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TARGET_QUERY_SECONDS = 2.0
TARGET_OPEN_SECONDS = 0.3
TARGET_MEMORY_BYTES = 4 << 30
CHUNK, BATCH, PAGE = 2048, 256, 16
PREFILL_SHARE = 0.7
REPEATS = 3

# What plain Polars and pandas are asked too: the SQL for the store, whose rows theirs must equal.
SHARED = {
    "writes of one slot": "select forward, position, token from slot_writes where slot = {slot} and pool_group = 0 "
    "order by forward",
    "damage by request": "select request_id, min(forward) as first_forward, count(distinct slot) as slots, "
    "count(*) as found from violations group by request_id order by request_id",
    "damage by last writer": "select writer_forward, count(distinct slot) as slots, count(*) as found from violations "
    "group by writer_forward order by writer_forward",
    "tokens of the requests hit": "select request_id, count(*) as tokens from tokens "
    "where request_id in (select request_id from violations) group by request_id order by request_id",
}


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--violations", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", choices=["polars", "pandas"], action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(ENGINES[options.engine](options.folder, options.threads)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvcanary-") as folder:
        data = options.folder or Path(folder)
        data.mkdir(parents=True, exist_ok=True)
        if not (data / "trace.report" / "summary.json").exists():
            make_data(data, options.tokens, options.violations)
        add_incidents(data)
        engines = ["store"]
        engines += [n for n in ("polars", "pandas") if n not in options.without and importlib.util.find_spec(n)]
        figures = {name: in_process(name, data, options.threads) for name in engines}
    figures["rows"] = {"tokens": options.tokens, "violations": options.violations}
    return tell(figures, options.json)


def in_process(engine: str, folder: Path, threads: int) -> dict[str, Any]:
    """Run one engine in a process of its own."""
    command = [sys.executable, __file__, "--engine", engine, "--folder", str(folder), "--threads", str(threads)]
    environment = os.environ | {"POLARS_MAX_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr}")
    return json.loads(done.stdout)


def make_data(folder: Path, num_tokens: int, num_violations: int) -> None:
    """Write trace.arrow, and trace.report with as many violations."""
    from kvcanary.recorder.header import PoolGroup, StateTable, TraceHeader
    from kvcanary.recorder.writer import TraceWriter

    num_slots = max(1 << 16, 1 << (num_tokens // 100).bit_length())
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=num_slots, page_size=PAGE),),
        tables=(StateTable(rows=BATCH + 1, width=1 << 15),),
    )
    random = np.random.default_rng(0)
    with TraceWriter(folder / "trace.arrow", header, overwrite=True, max_queued_bytes=2 << 30) as writer:
        forward = write_forwards(writer, random, num_tokens, num_slots)
        if not writer.flush(timeout=600):
            raise SystemExit("the disk is too slow for the trace")
    if writer.dropped_events:
        raise SystemExit(f"{writer.dropped_events} events were dropped: the disk is too slow")
    write_report(folder, random, num_violations, forward, num_slots)


def add_incidents(folder: Path) -> None:
    """Find the incidents of the report, as a replay does, where it has none."""
    from kvcanary.analysis.incidents.finding import find_incidents, incidents_fit, write_incidents

    report = folder / "trace.report"
    if not incidents_fit(report):
        write_incidents(report, find_incidents(report, [folder / "trace.arrow"]))


def write_forwards(writer: Any, random: Any, num_tokens: int, num_slots: int) -> int:
    """Write requests that are prefilled in chunks and then decoded together; returns the number of forwards."""
    from kvcanary.recorder.event import TraceEvent

    def append(kind: str, scalars: dict[str, Any], ints: dict[str, Any] | None = None) -> None:
        while writer.stats().queued_bytes > 1 << 30:
            time.sleep(0.01)
        writer.append(TraceEvent(kind=kind, time_ns=event_ns(), scalars=scalars, ints=ints or {}))

    written = forward = slot = request = 0
    clock = iter(range(1_700_000_000_000_000_000, 1 << 62, 1_000_000))
    event_ns = lambda: next(clock)  # noqa: E731
    chunks_a_request = 4
    while written < num_tokens:
        ids = np.arange(request, request + BATCH)
        request += BATCH
        prompt = CHUNK * chunks_a_request
        room = int(BATCH * prompt + (1 - PREFILL_SHARE) / PREFILL_SHARE * BATCH * prompt)
        prompts = BATCH if written + room <= num_tokens else max(1, (num_tokens - written) // prompt)
        for number, request_id in enumerate(ids[:prompts]):
            append("request", {"request_id": int(request_id), "name": f"r{request_id}", "prompt_len": prompt})
            for chunk in range(chunks_a_request):
                slots = (slot + np.arange(CHUNK)) % (num_slots - PAGE) + PAGE
                slot += CHUNK
                ints = {
                    "req_pool_indices": np.array([number + 1]),
                    "request_ids": np.array([request_id]),
                    "prefix_lens": np.array([chunk * CHUNK]),
                    "extend_lens": np.array([CHUNK]),
                    "input_ids": random.integers(0, 50_000, CHUNK),
                    "positions": np.arange(chunk * CHUNK, (chunk + 1) * CHUNK),
                    "out_cache_loc": slots,
                }
                append("forward", {"forward": forward, "mode": "extend"}, ints)
                forward += 1
        written += prompts * prompt
        for step in range(int(prompt * (1 - PREFILL_SHARE) / PREFILL_SHARE)):
            if written >= num_tokens:
                break
            slots = (slot + np.arange(prompts)) % (num_slots - PAGE) + PAGE
            slot += prompts
            ints = {
                "req_pool_indices": np.arange(1, prompts + 1),
                "request_ids": ids[:prompts],
                "prefix_lens": np.full(prompts, prompt + step),
                "extend_lens": np.ones(prompts, dtype=np.int64),
                "input_ids": random.integers(0, 50_000, prompts),
                "positions": np.full(prompts, prompt + step),
                "out_cache_loc": slots,
            }
            append("forward", {"forward": forward, "mode": "decode"}, ints)
            forward += 1
            written += prompts
    return forward


def write_report(folder: Path, random: Any, count: int, num_forwards: int, num_slots: int) -> None:
    """Write violations that begin half way: a few dozen requests, some thousand slots, again and again."""
    from kvcanary.recorder.reader import TraceReader
    from kvcanary.replayer.report import ReportSinks
    from kvcanary.replayer.violations import VIOLATION_SCHEMA

    report = folder / "trace.report"
    report.mkdir(exist_ok=True)
    with ReportSinks(report, sliding=False) as sinks:
        for start in range(0, count, 1 << 16):
            n = min(1 << 16, count - start)
            forwards = num_forwards // 2 + (np.arange(start, start + n) * (num_forwards // 2) // count)
            slots = PAGE + random.integers(0, min(num_slots - PAGE, 4096), n)
            requests = random.integers(0, 48, n)
            columns = {name: np.zeros(n, dtype=np.int64) for name in VIOLATION_SCHEMA.names}
            columns |= {
                "slot": slots,
                "position": slots,
                "expected_position": slots,
                "stored_token": random.integers(0, 50_000, n),
                "expected_token": random.integers(0, 50_000, n),
                "event": forwards + 256,
                "forward": forwards,
                "first_forward": forwards,
                "last_forward": forwards,
                "num_forwards": np.ones(n, dtype=np.int64),
                "request_id": requests,
                "writer_forward": slots % max(num_forwards // 2, 1),
                "writer_event": slots,
                "writer_request_id": slots % 48,
            }
            texts = {
                "launch": "HEAD_K_FULL",
                "reasons": "VERIFY_TOKEN",
                "oracle": "truth",
                "mode": "decode",
                "endpoint": "HEAD",
                "half": "K",
                "request": "r",
                "writer_request": "r",
            }
            arrays = [
                pa.array([texts[field.name]] * n, pa.utf8()).cast(field.type)
                if field.name in texts
                else pa.array(columns[field.name]).cast(field.type)
                for field in VIOLATION_SCHEMA
            ]
            sinks.violations.append(pa.table(arrays, schema=VIOLATION_SCHEMA))
    with TraceReader(folder / "trace.arrow") as reader:
        trace_id = reader.header.trace_id
    summary = {"trace": str((folder / "trace.arrow").absolute()), "trace_id": trace_id}
    (report / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def ask_store(folder: Path, threads: int) -> dict[str, Any]:
    """Build report.duckdb where it is not yet, open it, and ask everything."""
    from kvcanary.analysis import open_report
    from kvcanary.analysis.answers import ANSWERS
    from kvcanary.analysis.sources import find_sources
    from kvcanary.analysis.store import build_store, fresh_store
    from kvcanary.analysis.triage import answer

    report = folder / "trace.report"
    [source] = find_sources([report])
    started = time.perf_counter()
    if fresh_store(source) is None:
        build_store(source)
    build_seconds = time.perf_counter() - started
    build_bytes = peak_bytes()
    seconds, results = {}, {}
    open_seconds, _ = best(lambda: open_report(report).close())
    with open_report(report) as session:
        session.sql(f"set threads = {threads}")
        session.sql("set memory_limit = '3GB'")
        slot = session.sql("select slot from first_damage")["slot"][0].as_py()
        for name, query in SHARED.items():
            seconds[name], rows = best(lambda query=query: session.sql(query.format(slot=slot)).to_pylist())
            results[name] = digest(rows)
        first = session.sql("from first_damage").to_pylist()[0]
        for name in ANSWERS:
            seconds[f"triage: {name}"], _ = best(lambda name=name: answer(session, name, first))
        for query in (f"from slot_history({slot})", f"from slot_owner({slot}, 100)", f"from neighbours({slot})",
                      "from request_timeline(7)", "from first_bad_forward()", "from blast_radius()", "from blast_radius(1)", "from incident_requests",
                      "from lost"):  # fmt: skip
            seconds[query], _ = best(lambda query=query: session.sql(query))
        for name in ("tokens", "violations"):
            path = folder / f"{name}.parquet"
            if not path.exists():
                with pq.ParquetWriter(path, session.batches(f"from {name} limit 0").schema) as writer:
                    for batch in session.batches(f"from {name}"):
                        writer.write_batch(batch)
        size_bytes = (report / "report.duckdb").stat().st_size
    return {
        "seconds": seconds,
        "results": results,
        "slot": slot,
        "open_seconds": open_seconds,
        "build_seconds": build_seconds,
        "build_bytes": build_bytes,
        "size_bytes": size_bytes,
        "peak_bytes": peak_bytes(),
    }


def ask_polars(folder: Path, _: int) -> dict[str, Any]:
    """The shared queries in plain Polars, lazily over Parquet."""
    import polars as pl

    tokens, violations = pl.scan_parquet(folder / "tokens.parquet"), pl.scan_parquet(folder / "violations.parquet")
    slot = violations.sort("event", "request_id", "position", "slot").select("slot").head(1).collect().item()
    found = [pl.col("slot").n_unique().alias("slots"), pl.len().alias("found")]
    first = pl.col("forward").min().alias("first_forward")
    hit = violations.select("request_id").unique()
    return timed(
        {
            "writes of one slot": tokens.filter(pl.col("slot") == slot)
            .select("forward", "position", "token")
            .sort("forward"),
            "damage by request": violations.group_by("request_id").agg(first, *found).sort("request_id"),
            "damage by last writer": violations.group_by("writer_forward").agg(*found).sort("writer_forward"),
            "tokens of the requests hit": tokens.join(hit, on="request_id", how="semi")
            .group_by("request_id")
            .agg(pl.len().alias("tokens"))
            .sort("request_id"),
        },
        lambda lazy: lazy.collect().to_dicts(),
    )


def ask_pandas(folder: Path, _: int) -> dict[str, Any]:
    """The shared queries in pandas: the columns that a query needs are read, then it is done in memory."""
    import pandas as pd

    def tokens(*columns: str) -> Any:
        return pd.read_parquet(folder / "tokens.parquet", columns=list(columns))

    def violations(*columns: str) -> Any:
        return pd.read_parquet(folder / "violations.parquet", columns=list(columns))

    firsts = violations("event", "request_id", "position", "slot")
    slot = int(firsts.sort_values(["event", "request_id", "position", "slot"])["slot"].iloc[0])

    def writes() -> Any:
        frame = tokens("forward", "position", "token", "slot")
        return frame[frame["slot"] == slot].drop(columns="slot").sort_values("forward")

    def by(key: str, **aggregates: Any) -> Any:
        frame = violations(*dict.fromkeys([key, "slot", "forward"]))
        return frame.groupby(key, sort=True).agg(**aggregates).reset_index()

    def of_hit() -> Any:
        frame = tokens("request_id")
        frame = frame[frame["request_id"].isin(violations("request_id")["request_id"].unique())]
        return frame.groupby("request_id", sort=True).size().reset_index(name="tokens")

    counts = {"slots": ("slot", "nunique"), "found": ("slot", "size")}
    return timed(
        {
            "writes of one slot": writes,
            "damage by request": lambda: by("request_id", first_forward=("forward", "min"), **counts),
            "damage by last writer": lambda: by("writer_forward", **counts),
            "tokens of the requests hit": of_hit,
        },
        lambda query: query().to_dict("records"),
    )


ENGINES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "store": ask_store,
    "polars": ask_polars,
    "pandas": ask_pandas,
}


def timed(queries: dict[str, Any], run: Callable[[Any], list[dict[str, Any]]]) -> dict[str, Any]:
    """Run each query; its seconds and a digest of its rows."""
    seconds, results = {}, {}
    for name, query in queries.items():
        seconds[name], rows = best(lambda query=query: run(query))
        results[name] = digest(rows)
    return {"seconds": seconds, "results": results, "peak_bytes": peak_bytes()}


def best(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the shortest of some runs, in seconds, and the last result."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        result = run()
        taken.append(time.perf_counter() - started)
    return min(taken), result


def digest(rows: list[dict[str, Any]]) -> str:
    """Return a text that is the same for the same rows, whatever engine they come from."""
    import hashlib

    text = json.dumps([[int(value) for value in row.values()] for row in rows])
    return f"{len(rows)} rows {hashlib.sha256(text.encode()).hexdigest()}"


def peak_bytes() -> int:
    """Return this process's peak resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tell(figures: dict[str, Any], as_json: bool) -> int:
    """Print the figures; the exit status."""
    store = figures["store"]
    slow = [name for name, seconds in store["seconds"].items() if seconds > TARGET_QUERY_SECONDS]
    missed = bool(slow) or store["open_seconds"] > TARGET_OPEN_SECONDS
    missed = missed or max(store["peak_bytes"], store["build_bytes"]) > TARGET_MEMORY_BYTES
    others = [name for name in ("polars", "pandas") if name in figures]
    differs = [n for n in SHARED for other in others if figures[other]["results"][n] != store["results"][n]]
    if as_json:
        print(json.dumps(figures, indent=2))
        return 2 if differs else int(missed)
    rows = figures["rows"]
    print(f"{rows['tokens']:,} token rows, {rows['violations']:,} violations")
    print(
        f"report.duckdb: built in {store['build_seconds']:.1f} s with {store['build_bytes'] / 2**30:.2f} GiB, "
        f"{store['size_bytes'] / 2**20:.0f} MiB; opened in {store['open_seconds']:.3f} s"
    )
    print(f"{'query':34} {'store':>9}" + "".join(f" {name:>9} {'ratio':>6}" for name in others))
    for name, seconds in store["seconds"].items():
        line = f"{name:34} {seconds:8.3f}s"
        for other in others if name in SHARED else []:
            theirs = figures[other]["seconds"][name]
            ratio = f"{theirs / seconds:5.1f}x" if name not in differs else "differs"
            line += f" {theirs:8.3f}s {ratio:>6}"
        print(line)
    print(f"{'peak memory':34} {store['peak_bytes'] / 2**30:6.2f}GiB", *(
        f"{other} {figures[other]['peak_bytes'] / 2**30:.2f}GiB" for other in others))  # fmt: skip
    return 2 if differs else int(missed)


if __name__ == "__main__":
    sys.exit(main())
