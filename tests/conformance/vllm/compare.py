"""Replaying a run's trace, and looking for each injected fault in what the replay found."""

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
from connector_faults import EXPECTED, EXPECTED_ON_GPU, EXPECTED_UNKNOWN
from layer_faults import VALUE_FAULTS

# What was sampled is known behind the draft's steps: the next round reads it. Of some forwards alone outputs are looked at.
LATE = {"draft_token": 9, "kernel_window": 40}
LATEST = 3  # forwards after a fault within which it must have been found, its step's own among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run; `wrong` is empty where all is as it should be."""

    forwards: int = 0
    split_steps: int = 0
    verified: int = 0
    swept: int = 0
    requests: int = 0
    retracted: int = 0
    shared: int = 0
    evicted: int = 0
    verdict: str = ""
    exit_code: int = -1
    injected: int = 0
    found: int = 0
    latest: int = 0
    wrong: tuple[str, ...] = field(default_factory=tuple)


def compare(folder: Path, *, faulty: bool) -> Result:
    """Replay the one trace in `folder / "traces"`; what is wrong is said, not raised."""
    from kvcanary.recorder.trace.batch import TraceGap
    from kvcanary.recorder.trace.reader import TraceReader

    traces = sorted((folder / "traces").glob("*.arrow"))
    if len(traces) != 1:
        return Result(wrong=(f"{len(traces)} traces, expected one",))
    replayed = subprocess.run(
        [Path(sys.executable).with_name("kvcanary-replay"), "--report", str(folder / "report"), str(traces[0])],
        capture_output=True,
        text=True,
        check=False,
    )
    summary_path = folder / "report" / "summary.json"
    if not summary_path.exists():
        return Result(wrong=(f"replay ended with {replayed.returncode}: {replayed.stderr.strip()[-300:]}",))
    summary = json.loads(summary_path.read_text())
    marks, kinds, counts = [], [], {"retracted": 0, "shared": 0}
    with TraceReader(traces[0]) as reader:
        for batch in reader.stream():
            for event in () if isinstance(batch, TraceGap) else batch:
                kinds.append(event.kind)
                status = str(event.scalar("status"))
                if event.kind in ("status", "alloc") and status in counts:
                    counts[status] += 1
                if event.kind == "mark":
                    marks.append(json.loads(str(event.scalar("labels"))))
    # What shows in a later round of the same request alone does not in the last ones.
    last = kinds.count("forward") - 1
    marks = [fault for fault in marks if fault["forward"] + LATE.get(fault["fault"], 0) <= last]
    missed, latest = _missed(marks, folder / "report", traces[0])
    wrong = [f"missed: {json.dumps(fault, sort_keys=True)}" for fault in missed]
    expected = 1 if faulty else 0
    if replayed.returncode != expected:
        wrong.append(f"the replay ended with {replayed.returncode}, expected {expected}")
    if faulty and not marks:
        wrong.append("no fault was injected")
    return Result(
        forwards=kinds.count("forward"),
        split_steps=sum(a == b == "forward" for a, b in itertools.pairwise(kinds)),
        verified=int(summary["verified"]),
        swept=sum(n for tag, n in summary["slot_counters"].items() if tag.startswith("SWEEP")),
        requests=kinds.count("request"),
        retracted=counts["retracted"],
        shared=counts["shared"],
        evicted=kinds.count("evict"),
        verdict=str(summary["verdict"]),
        exit_code=replayed.returncode,
        injected=len(marks),
        found=len(marks) - len(missed),
        latest=latest,
        wrong=tuple(wrong),
    )


def _missed(marks: list[dict], report: Path, trace: Path) -> tuple[list[dict], int]:
    """Return the faults that nothing was found of, and after how many forwards the slowest was found."""
    if marks and marks[0]["fault"] in EXPECTED:
        return _copies_missed(marks, report)
    from kvcanary.analysis.store.expansion import expand_tables, read_violations

    by_forward = expand_tables(read_violations(report / "violations.parquet"), trace)
    rows = [dict(row, kind="") for table in by_forward for row in table.to_pylist()]
    rows += [
        dict(row, reasons="", expected_position=row["position"])
        for row in pq.read_table(report / "findings.parquet").to_pylist()
    ]
    missed, latest = [], 0
    for fault in marks:
        found = [row["forward"] - fault["forward"] for row in rows if _is_of(row, fault)]
        if found:
            latest = max(latest, min(found))
        else:
            missed.append(fault)
    return missed, latest


def _copies_missed(marks: list[dict], report: Path) -> tuple[list[dict], int]:
    """Return a connector's faults, all of one kind, unless an incident of theirs was found, and none that is not."""
    path = report / "incidents.parquet"
    kinds = pq.read_table(path)["kind"].to_pylist() if path.exists() else []
    name = report.parent.name
    expected = EXPECTED_UNKNOWN if "-unknown" in name else EXPECTED
    expected = EXPECTED_ON_GPU if name.startswith(("v1-", "v2-")) else expected
    right = kinds and set(kinds) <= expected[marks[0]["fault"]]
    return ([] if right else [{**marks[0], "incidents": kinds}] * len(marks)), 0


def _is_of(row: dict, fault: dict) -> bool:
    """Say whether a violation or a finding is of a fault: right place, right request, right kind, in time."""
    if not 0 <= row["forward"] - fault["forward"] <= LATE.get(fault["fault"], LATEST):
        return False
    kind, mine = fault["fault"], row["request"] == fault["request"]
    here = row["group"] == fault.get("group") and 0 <= row["slot"] - fault.get("slot", 0) < fault.get("count", 0)
    if kind == "draft_slot":
        return mine and here and row["kind"] == "write_to_foreign_slot"
    if kind in ("draft_seq_lens", "draft_slot_mapping", "draft_table"):
        # On a GPU the table that the draft's attention gets is the one that is recorded: what lies there shows it.
        read = kind != "draft_seq_lens" and bool(row["reasons"])
        return mine and (read or row["kind"].startswith("attention") or row["kind"] == "table_entry_differs")
    if kind in ("draft_position", "draft_step_position"):
        return mine and "POSITION" in row["reasons"]
    if kind == "draft_token":
        return mine and "TOKEN" in row["reasons"]
    if kind == "draft_lost_write":
        return mine and row["kind"] == "write_lost" and row["position"] == fault["position"]
    if kind.startswith("attention"):
        return mine and row["kind"].startswith("attention")
    if kind == "kernel_window":
        return row["kind"] == "wrong_window"
    if kind == "late_layer":
        return here and row["kind"] == "layer_changed"
    if kind in VALUE_FAULTS:
        named = row["kind"] == "bad_values" and row["detail"].endswith(f"V of layer {fault['layer']}")
        return mine and named and row["position"] == fault["position"]
    if kind.startswith("state"):
        return mine and row["kind"] == "state_differs"
    if kind == "block_table":
        return mine and here
    if kind == "slot_mapping":
        right = row["group"] == fault["group"] and row["slot"] == fault["right"]
        return (mine and here) or (mine and right) or (here and bool(row["reasons"]))
    if kind == "token":
        at = row["expected_position"] == fault["position"] or row["position"] == fault["position"]
        return mine and at and (row["kind"].startswith("input_not") or "TOKEN" in row["reasons"])
    if kind == "position":
        return mine and "POSITION" in row["reasons"] and row["position"] - fault["position"] in (0, 1)
    return here and "KV_HASH" in row["reasons"]
