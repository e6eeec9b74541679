"""Replaying a run's trace and holding what it finds against what the online canary found, forward by forward."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from online import TAGS, OnlineFindings, Row, canonical, read_online

FIELDS = (
    "launch_tag",
    "slot",
    "position",
    "stored_token",
    "expected_token",
    "stored_chain_hash",
    "expected_aux",
    "fail_reason_bits",
)
FIRST_STEP = re.compile(r"online canary: forward 0 is its step (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of a run; `differences` is empty where online and offline are equal."""

    forwards: int = 0
    injected: int = 0
    online_rows: int = 0
    offline_rows: int = 0
    slots_looked_at: int = 0
    verdict: str = ""
    findings: dict[str, int] = field(default_factory=dict)
    differences: tuple[str, ...] = ()


def compare(folder: Path) -> Comparison:
    """Replay the one trace in `folder / "traces"` and compare; what is wrong is said, not raised."""
    traces = sorted((folder / "traces").glob("*.arrow"))
    if len(traces) != 1:
        return Comparison(differences=(f"{len(traces)} traces, expected one",))
    online = read_online(folder)
    replayed = subprocess.run(
        [
            Path(sys.executable).with_name("kvcanary-replay"),
            *("--report", str(folder / "report"), str(traces[0])),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    summary_path = folder / "report" / "summary.json"
    if not summary_path.exists():
        return Comparison(differences=(f"replay ended with {replayed.returncode}: {replayed.stderr.strip()}",))
    summary = json.loads(summary_path.read_text())
    offline = offline_rows(folder / "report" / "violations.parquet", traces[0])
    first = first_step(traces[0])
    return Comparison(
        forwards=summary["forwards"],
        injected=online.injected,
        online_rows=sum(rows.total() for rows in online.by_step.values()),
        offline_rows=sum(rows.total() for rows in offline.values()),
        slots_looked_at=sum(summary["slot_counters"].values()),
        verdict=summary["verdict"],
        findings={name: n for name, n in summary["findings_by_kind"].items() if n},
        differences=tuple(differences(online, offline, first, summary)),
    )


def offline_rows(path: Path, trace: Path) -> dict[int, Counter[Row]]:
    """Return the replay's rows by forward; a violation of several forwards counts in each."""
    from kvcanary.analysis.store.expansion import expand_tables, read_violations

    rows: dict[int, Counter[Row]] = {}
    for table in expand_tables(read_violations(path), trace) if path.exists() else ():
        for row in table.to_pylist():
            rows.setdefault(row["forward"], Counter())[canonical([row[name] for name in FIELDS])] += 1
    return rows


def first_step(trace: Path) -> int | None:
    """Return the canary's step at which forward 0 ran, None where the trace does not say."""
    from kvcanary.recorder.trace.reader import TraceReader

    with TraceReader(trace) as reader:
        notes = reader.header.notes
    found = [match for match in map(FIRST_STEP.fullmatch, notes) if match]
    return int(found[0][1]) if found else None


def differences(
    online: OnlineFindings, offline: dict[int, Counter[Row]], first: int | None, summary: dict
) -> list[str]:
    """Return everything in which the two differ, each difference a line."""
    if first is None:
        return ["the trace does not say at which of the canary's steps it begins"]
    found = []
    if online.generated != 6:
        found.append(f"the engine answered {online.generated} of 6 requests")
    steps = sorted(online.counters)
    if not steps or steps[-1] - first + 1 != summary["forwards"]:
        found.append(f"{summary['forwards']} forwards recorded, the canary made steps {first} to {steps[-1:]}")
    for forward in sorted(set(offline) | {step - first for step in online.by_step}):
        expected, came = online.by_step.get(forward + first, Counter()), offline.get(forward, Counter())
        if expected != came:
            found.append(
                f"forward {forward}: online only {_show(expected - came)}; offline only {_show(came - expected)}"
            )
    everything = sum(online.by_step.values(), Counter())
    if online.logged - everything:
        found.append(f"logged, but not in the ring: {_show(online.logged - everything)}")
    if steps:
        before = online.counters.get(first - 1, [0] * len(TAGS))
        looked_at = {tag: end - start for tag, start, end in zip(TAGS, before, online.counters[steps[-1]], strict=True)}
        counted = summary["slot_counters"]
        found += [
            f"{tag}: {online_count} slots looked at online, {counted.get(tag, 0)} offline"
            for tag, online_count in looked_at.items()
            if online_count != counted.get(tag, 0)
        ]
    if summary["doubts"] or not summary["complete"]:
        found.append(f"the trace is not whole: {summary['doubts']}")
    return found


def _show(rows: Counter[Row]) -> str:
    shown = [
        f"{TAGS[tag]} slot {slot} position {position} tokens {stored}/{expected} hashes {chain:#x}/{aux:#x} "
        f"reasons {reasons} x{count}"
        for (tag, slot, position, stored, expected, chain, aux, reasons), count in list(rows.items())[:3]
    ]
    return f"{rows.total()} ({'; '.join(shown)})" if rows else "none"
