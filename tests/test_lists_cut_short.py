"""A list that can just be shown whole is shown whole; one that is longer by one says so, and never "and 0 more"."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary.analysis.diff.result import DiffResult
from kvcanary.recorder.trace.event import TraceEvent, loss_event
from kvcanary.recorder.writing.recovery import MAX_CAUSES
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.cli.incident_blocks import MOST_SHOWN, show_incidents
from kvcanary.replayer.cli.screen import show
from kvcanary.replayer.lab.claims import Claim, cells
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import ReplaySettings, replay
from rich.console import Console

from .support.commands import run
from .support.hand_made import HEADER
from .support.places import DATA
from .support.raw_traces import write_raw

INCIDENT = {
    "incident": 1, "title": "t", "kind": "k", "confidence": "low", "score": 0.1, "sentence": "s", "time_ns": 0, "mode": "",
    "first_request": "r0", "requests": [], "num_requests": 0, "first_forward": 1, "last_forward": 1, "slots": [],
    "num_slots": 0, "in_slot": "", "expected": "", "violations": 0, "findings": 0, "seen_by": [], "alternatives": [],
    "alternative_scores": [],
}  # fmt: skip


def more_in(text: str) -> list[str]:
    """Return what is said to be more."""
    return [line[line.index("and ") :] for line in text.splitlines() if " more" in line and "and " in line]


def printed(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(console, summary)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def summary() -> Summary:
    return replay(DATA / "table_swap.arrow", settings=ReplaySettings(), report=None)


@pytest.mark.parametrize(("count", "said"), [(10, 0), (11, 1)])
def test_marks_losses_and_gaps_of_a_trace(count: int, said: int, tmp_path: Path) -> None:
    events = [TraceEvent(kind="mark", scalars={"note": f"m{number}"}) for number in range(count)]
    events += [loss_event(lost_events=1, note="full") for _ in range(count)]
    output = run("inspect", write_raw(tmp_path / "t.arrow", HEADER, events)).stdout
    assert more_in(output) == ["and 1 more marks", "and 1 more losses"] * said


def torn(path: Path, gaps: int) -> Path:
    """A trace with so many gaps: in every other batch a byte is changed."""
    events = [TraceEvent(kind="mark", scalars={"note": f"{number}" * 40}) for number in range(2 * gaps + 2)]
    with TraceWriter(path, HEADER, compression="none") as writer:
        for event in events:
            assert writer.append(event)
            writer.flush()
    data = bytearray(path.read_bytes())
    for number in range(1, 2 * gaps, 2):
        data[data.index(f"{number}".encode() * 40) + 3] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("more", [0, 1])
def test_causes_of_a_recovered_trace(more: int, tmp_path: Path) -> None:
    output = run("recover", torn(tmp_path / "t.arrow", MAX_CAUSES + more)).stdout
    assert more_in(output) == ["and 1 more gaps"] * more


@pytest.mark.parametrize("more", [0, 1])
def test_lists_of_a_replay(more: int, summary: Summary) -> None:
    lines = [f"line {number}" for number in range(5 + more)]
    longer = replace(summary, incidents=(), gaps=lines, num_gaps=len(lines), losses=lines, num_losses=len(lines))
    assert more_in(printed(longer)) == ["and 1 more in summary.json"] * 2 * more


@pytest.mark.parametrize("more", [0, 1])
def test_requests_that_a_violation_hit(more: int, summary: Summary) -> None:
    hit = {number: f"r{number}" for number in range(6 + more)}
    (line,) = [line for line in printed(replace(summary, incidents=(), requests_hit=hit)).splitlines() if "r5" in line]
    assert (" and 1 more" in line, "more" in line) == (bool(more), bool(more))


@pytest.mark.parametrize("total", range(MOST_SHOWN - 1, MOST_SHOWN + 3))
@pytest.mark.parametrize("given", [3, MOST_SHOWN, MOST_SHOWN + 2])
def test_incidents(given: int, total: int) -> None:
    console = Console(file=io.StringIO(), width=200)
    show_incidents(console, [INCIDENT] * min(given, total), total=total, first_time_ns=0)
    left = total - min(given, total, MOST_SHOWN)
    said = [line.partition(":")[0] for line in more_in(console.file.getvalue())]  # type: ignore[attr-defined]
    assert said == ([f"and {left} more"] if left else [])


@pytest.mark.parametrize("more", [0, 1])
def test_requests_of_an_incident(more: int) -> None:
    names = [f"r{number}" for number in range(6 + more)]
    console = Console(file=io.StringIO(), width=200)
    row = INCIDENT | {"requests": names, "num_requests": len(names)}
    show_incidents(console, [row], total=1, first_time_ns=0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("r5 and 1 more" in text, "more" in text) == (bool(more), bool(more))


@pytest.mark.parametrize("more", [0, 1])
def test_checks_that_found_a_fault_of_the_lab(more: int) -> None:
    claim = Claim(
        fault="f", benign=False, reference="", summary="", configs=(), runs=9, injected=9, effects=9, detected=9, in_time=9,
        max_delay=0, by={f"check{number}": 1 for number in range(4 + more)}, false_positives=0, failures=(),
    )  # fmt: skip
    assert [cell.rpartition(", ")[2] for cell in cells(claim) if "more" in cell] == ["and 1 more"] * more


@pytest.mark.parametrize("more", [0, 1])
def test_doubts_of_a_comparison(more: int) -> None:
    totals: Any = [SimpleNamespace(doubts=[f"d{n}" for n in range(5 + more)], complete=True)] * 2
    doubts = DiffResult.doubts.fget(SimpleNamespace(totals=totals, compared={"tokens": 1}))  # type: ignore[attr-defined]
    assert [doubt for doubt in doubts if "more" in doubt] == ["A: and 1 more", "B: and 1 more"] * more
