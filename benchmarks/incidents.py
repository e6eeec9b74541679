"""Measure incidents: is each fault of the lab told apart, and is one fault one incident?

    python benchmarks/incidents.py [--seeds 5] [--first-seed 0] [--jobs 1] [--output incidents-matrix.parquet] [--write]
    python benchmarks/incidents.py --seeds 200 --jobs 16 --write

Runs the lab's trials (each fault in turns over the configurations that have its mechanism, and clean runs), replays each,
finds the incidents of its report, and compares the kind that is ranked first with the fault. The rules were developed
on seeds 1000 to 1029; --first-seed 0 are others. Every few seconds, at the end and on Ctrl-C the rows go to the output
file, and the same command goes on from there; rows of another build are refused unless --force starts anew.

--write puts the table into docs/reference/incidents.md. Exit status: 0 where the claims hold (the right kind first for 95 % of
detected faults, among the first three for 99 %, 1.2 incidents a fault at most, none in clean runs), 1 where they do not.
Needs no DuckDB.
"""

import argparse
import datetime
import hashlib
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from kvcanary.analysis.incidents.finding import Incidents, find_incidents
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.matrix import CLEAN, as_they_come, build_id, plan_trials
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.run.replay import replay, replay_joined
from kvcanary.replayer.run.settings import ReplaySettings

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "incidents.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TARGET_FIRST, TARGET_THREE, TARGET_INCIDENTS = 0.95, 0.99, 1.2
SAVE_EVERY_S: Final = 15.0

# The one table of what is right. A fault's own name is a kind, but for the canary's three flips of a byte: when a byte
# was flipped, and whether anybody had a use for the slot, does not change what it is.
ACCEPTED: Final[dict[str, tuple[str, ...]]] = {
    **{name: (name,) for name, fault in FAULTS.items() if not fault.benign},
    "kv_used": ("kv_changed",),
    "kv_unused_cache": ("kv_changed",),
    "kv_post_forward": ("kv_changed",),
    "adapter_not_in_key": ("identity_not_in_key",),
    "attention_prefix_lost": ("attention_seq_len_wrong",),
    "attention_seq_len_off_by_one": ("attention_seq_len_wrong",),
    "late_layer_overwritten": ("layer_changed",),
    "nan_written": ("bad_values_written",),
}

# Counted apart: what the trace cannot tell from one another, and why. In `dsv4` all layers slide, so that no pool group
# has the full pages: their allocations and frees are in no event, and a full page in two hands looks the same whichever
# way it came there.
APART: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("double_free", "dsv4"): ("double_free", "page_given_twice"),
    ("page_given_twice", "dsv4"): ("double_free", "page_given_twice"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial: what the first incident was taken for, the three best kinds, and the kinds of all incidents."""

    fault: str
    config: str
    seed: int
    injected: bool = False
    incidents: int = 0
    kind: str = ""
    alternatives: str = ""
    score: float = 0.0
    kinds: str = ""
    violations: int = 0
    findings: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """What was tried."""
        return self.fault, self.config, self.seed


_TYPES: Final = {str: pa.utf8(), int: pa.int64(), bool: pa.bool_(), float: pa.float64()}
SCHEMA: Final = pa.schema([(item.name, _TYPES[item.type]) for item in fields(Row)])  # type: ignore[index]  # types, not their names


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--clean-seeds", type=int, default=24)
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only these")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("incidents-matrix.parquet"))
    parser.add_argument("--force", action="store_true", help="start anew where the rows are of another build")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reference/incidents.md")
    options = parser.parse_args()
    planned = [
        (fault, config, seed + options.first_seed)
        for fault, config, seed in plan_trials(
            faults=options.fault or list(FAULTS),
            configs=list(CONFIGURATIONS),
            seeds=options.seeds,
            clean_seeds=0 if options.fault else options.clean_seeds,
        )
    ]
    rows = run(planned, options.output, jobs=options.jobs, force=options.force)
    text, holds = told(rows, command=f"python benchmarks/incidents.py --seeds {options.seeds} --jobs {options.jobs}")
    print(text)
    if options.write:
        write_page(text)
        print(f"wrote {PAGE}", file=sys.stderr)
    return 0 if holds else 1


def build() -> str:
    """What the rows depend on: everything that records, replays and judges."""
    digest = hashlib.sha256(build_id().encode())
    for path in sorted((ROOT / "analysis" / "incidents").rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{build_id()}+{digest.hexdigest()[:8]}"


def run(planned: list[tuple[str, str, int]], output: Path, *, jobs: int, force: bool) -> list[Row]:
    """Run what is planned and not yet in `output`; return all planned rows."""
    rows = {row.key: row for row in load(output, force=force)}
    todo = [key for key in planned if key not in rows]
    done, began, saved = len(planned) - len(todo), time.monotonic(), time.monotonic()
    try:
        for row in as_they_come(try_one, todo, jobs):
            rows[row.key] = row
            done += 1
            if time.monotonic() - saved > SAVE_EVERY_S:
                save(output, list(rows.values()))
                saved = time.monotonic()
                print(f"{done:,} of {len(planned):,} trials, {saved - began:.0f} s", file=sys.stderr)
    finally:
        save(output, list(rows.values()))
    return [rows[key] for key in planned]


def try_one(key: tuple[str, str, int]) -> Row:
    """Run one trial, replay it, find its incidents; those of a pair are both sides'."""
    fault, config, seed = key
    begin = time.perf_counter()
    try:
        injected, sides = incidents_of_trial(key)
        found = [row for side in sides for row in side.rows]
    except Exception as error:  # noqa: BLE001  # one trial's failure must not end an hour's work
        return Row(fault=fault, config=config, seed=seed, error=f"{type(error).__name__}: {error}")
    found.sort(key=lambda row: int(row["time_ns"]))
    first = found[0] if found else None
    return Row(
        fault=fault,
        config=config,
        seed=seed,
        injected=injected >= 0,
        incidents=len(found),
        kind=first["kind"] if first else "",
        alternatives=",".join(first["alternatives"]) if first else "",
        score=first["score"] if first else 0.0,
        kinds=",".join(row["kind"] for row in found),
        violations=sum(row["violations"] for row in found),
        findings=sum(row["findings"] for row in found),
        seconds=time.perf_counter() - begin,
    )


def incidents_of_trial(key: tuple[str, str, int]) -> tuple[int, list[Incidents]]:
    """Run one trial and replay it; return the forward of the fault, -1 if it found no place, and the incidents of each side."""
    fault, config, seed = key
    with tempfile.TemporaryDirectory(prefix="kvcanary-incidents-") as folder:
        trial = Trial(fault=FAULTS.get(fault), config=config, seed=seed)
        outcome = run_trial(trial, Path(folder) / "trace", overwrite=True)
        reports = [Path(folder) / f"{number}.report" for number in range(len(outcome.traces))]
        for report in reports:
            report.mkdir()
        if len(reports) == 1:
            replay(outcome.traces[0], settings=ReplaySettings(), report=reports[0])
        else:
            replay_joined(outcome.traces, settings=ReplaySettings(), reports=reports)
        both = zip(outcome.traces, reports, strict=True)
        return outcome.injected_forward, [find_incidents(report, [trace]) for trace, report in both]


def told(rows: list[Row], *, command: str) -> tuple[str, bool]:
    """Return the page's section, and whether the claims hold."""
    clean = [row for row in rows if row.fault == CLEAN or FAULTS[row.fault].benign]
    false = [row for row in clean if row.incidents]
    errors = [row for row in rows if row.error]
    found = [row for row in rows if row.fault in ACCEPTED and row.incidents]
    main_rows = [row for row in found if (row.fault, row.config) not in APART]
    apart = [row for row in found if (row.fault, row.config) in APART]
    first, three, incidents = shares(main_rows)
    strict = shares(found)
    seeds = sorted({row.seed for row in rows if row.fault in ACCEPTED})
    holds = first >= TARGET_FIRST and three >= TARGET_THREE and incidents <= TARGET_INCIDENTS
    holds &= not false and not errors
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        "Made by",
        "",
        f"    {command} --write",
        "",
        (
            f"on {today}, on {platform.machine()} with {os.cpu_count()} cores, Python {platform.python_version()}, kvcanary "
            f"{build()}: seeds {seeds[0] if seeds else 0} to {seeds[-1] if seeds else 0} of each fault, in turns over its "
            f"configurations, {sum(row.seconds for row in rows) / max(len(rows), 1):.2f} s a trial."
        ),
        "",
        (
            f"- right kind first: **{percent(first)}** of {len(main_rows):,} detected faults; among the first three: "
            f"**{percent(three)}**; incidents a fault: **{incidents:.2f}**"
        ),
        (
            f"- with those that are counted apart, by the fault's own name only: {percent(strict[0])}, {percent(strict[1])}, "
            f"{strict[2]:.2f} of {len(found):,}"
        ),
        f"- clean runs and runs of what is no fault: {len(clean):,}, with an incident: {len(false):,}",
        "",
        "| fault | detected | first | in three | incidents | taken for |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [line(name, [row for row in main_rows if row.fault == name]) for name in ACCEPTED if any(row.fault == name for row in main_rows)]  # fmt: skip
    if apart:
        lines += ["", "Counted apart:", "", lines_heading(), "| --- | ---: | ---: | ---: | ---: | --- |"]
        for fault, config in APART:
            mine = [row for row in apart if (row.fault, row.config) == (fault, config)]
            if mine:
                lines.append(line(f"{fault} on {config}", mine, APART[fault, config]))
    for row in [*errors, *false]:
        lines.append(f"\n- {row.fault} on {row.config}, seed {row.seed}: {row.error or 'incident ' + row.kinds}")
    return "\n".join(lines) + "\n", holds


def lines_heading() -> str:
    """The heading of a table of trials."""
    return "| fault | detected | first | in three | incidents | taken for |"


def line(name: str, rows: list[Row], accepted: tuple[str, ...] | None = None) -> str:
    """One fault's line."""
    first, three, incidents = shares(rows, accepted)
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(row.kind for row in rows).most_common())
    return f"| {name} | {len(rows):,} | {percent(first)} | {percent(three)} | {incidents:.2f} | {kinds} |"


def shares(rows: list[Row], accepted: tuple[str, ...] | None = None) -> tuple[float, float, float]:
    """Return how many have the right kind first, among the first three, and the incidents a trial."""
    total = max(len(rows), 1)
    first = three = 0
    for row in rows:
        right = accepted or ACCEPTED[row.fault]
        first += row.kind in right
        three += row.kind in right or bool(set(right) & set(row.alternatives.split(",")))
    return first / total, three / total, sum(row.incidents for row in rows) / total


def percent(share: float) -> str:
    """A share in words, never rounded up."""
    return f"{int(share * 1000) / 10:g} %"


def write_page(text: str) -> None:
    """Put the section between its marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def load(path: Path, *, force: bool) -> list[Row]:
    """Return the rows of an earlier call of the same build."""
    if not path.exists():
        return []
    table = pq.read_table(path)
    told_build = (table.schema.metadata or {}).get(b"build", b"").decode()
    if told_build != build() or table.schema.names != SCHEMA.names:
        if force:
            return []
        sys.exit(f"{path}: its rows are of build {told_build}, this is {build()}; name another file, or use --force")
    return [Row(**row) for row in table.to_pylist()]


def save(path: Path, rows: list[Row]) -> None:
    """Write all rows; whoever is interrupted meanwhile finds the file as it was before."""
    columns = [pa.array([asdict(row)[field.name] for row in rows], field.type) for field in SCHEMA]
    partial = path.with_name(path.name + ".partial")
    pq.write_table(pa.table(columns, schema=SCHEMA.with_metadata({"build": build()})), partial)
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
