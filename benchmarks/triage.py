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

import pyarrow.parquet as pq
from triage_data import add_incidents, make_data

TARGET_QUERY_SECONDS = 2.0
TARGET_OPEN_SECONDS = 0.3
TARGET_MEMORY_BYTES = 4 << 30
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


def ask_store(folder: Path, threads: int) -> dict[str, Any]:
    """Build report.duckdb where it is not yet, open it, and ask everything."""
    from kvcanary.analysis import open_report
    from kvcanary.analysis.store.sources import find_sources
    from kvcanary.analysis.store.store import build_store, fresh_store
    from kvcanary.analysis.store.triage import ANSWERS, answer

    report = folder / "trace.report"
    [source] = find_sources([report])
    started = time.perf_counter()
    if fresh_store(source) is None:
        build_store(source)
    build_seconds = time.perf_counter() - started
    build_bytes = peak_bytes()
    seconds, results = {}, {}
    open_seconds, _ = best(lambda: open_report(report).close())
    with open_report(report, unlocked=True) as session:
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
