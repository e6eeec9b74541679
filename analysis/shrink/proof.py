"""Whether a part of a trace shows the same incident, by replaying it."""

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from ...recorder.trace.event import batch_metadata, encode_events, header_schema
from ...recorder.writing.trace_file import TraceFile
from ...replayer.run.replay import ReplayRun
from ...replayer.run.settings import Progress, ReplaySettings
from ..incidents.alike import known_bugs
from ..incidents.finding import find_incidents
from ..incidents.rules import RULES
from .parts import Part
from .renaming import Names

_SAME: Final = ("kind", "branch", "first_forward", "mode", "first_request", "in_slot", "expected")
_SAME_WITHOUT_ORACLE: Final = ("kind", "branch", "first_forward", "mode", "first_request")
_EVENTS_AT_ONCE: Final = 1000
_OF_VIOLATIONS: Final = (
    "event",
    "request_id",
    "group",
    "slot",
    "expected_position",
    "fail_reason_bits",
    "launch_tag",
    "writer_event",
    "writer_request_id",
)
_OF_FINDINGS: Final = ("event", "request_id", "group", "slot", "position", "kind", "cause", "other_request_id", "count")

# A row of a report: what it says of whom, by names that stand for the same in a trace that was renamed.
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a replay shows: its incidents as rows of `INCIDENT_SCHEMA`, and every violation and finding."""

    incidents: list[dict[str, Any]]
    violations: list[Row]
    findings: list[Row]
    summary: Any

    def said(self) -> set[Row]:
        """Return what is said of each request and slot, without saying when."""
        seen = {(row[1], row[2], row[3], bit) for row in self.violations for bit in range(8) if row[5] >> bit & 1}
        return seen | {(row[1], row[5], row[6]) for row in self.findings}


def show(traces: Sequence[Path], on_progress: Callable[[Progress], None] = lambda _: None) -> Shown:
    """Replay a trace, or its segments, as `kvcanary-replay` does, and find its incidents; raise `TraceError`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder)
        with ReplayRun(list(traces), settings=ReplaySettings(), report=report) as run:
            while run.step():
                on_progress(run.progress())
            summary = run.finish()
        # By rules alone: what known bugs say of a kind goes by all that is seen, which is less in what is cut.
        alone = known_bugs().without(RULES)
        found = find_incidents(report, traces, known=alone).rows if summary.violations or summary.findings else []
        rows = []
        for name, columns in (("violations", _OF_VIOLATIONS), ("findings", _OF_FINDINGS)):
            table = pq.read_table(report / f"{name}.parquet", columns=list(columns))
            rows.append(list(zip(*(table[column].to_pylist() for column in columns), strict=True)))
    return Shown(incidents=found, violations=rows[0], findings=rows[1], summary=summary)


def write_part(part: Part, path: Path) -> None:
    """Write a part of a trace as a trace."""
    schema = header_schema(part.header)
    file = TraceFile(path, schema, compression="zstd", overwrite=True)
    for first in range(0, len(part.events), _EVENTS_AT_ONCE):
        batch = encode_events(part.events[first : first + _EVENTS_AT_ONCE], first, schema)
        file.write(batch, batch_metadata(batch, first))
    file.close()


def show_part(part: Part, folder: Path) -> Shown:
    """Write a part of a trace into a folder, and return what a replay of it shows."""
    path = folder / "part.arrow"
    write_part(part, path)
    return show([path])


class Judge:
    """Says of parts of a trace whether they show the incident that `whole` shows as its number `incident`, from 0.

    It is the same one if it has the same kind, is seen first in the same forward, by the same request, in the same slot with
    the same content of the same writer, and in the same words; and if nothing is found that the whole does not show too.
    """

    def __init__(self, whole: Shown, incident: int, folder: Path) -> None:
        self.wanted = whole.incidents[incident]
        self.replays = 0
        self._said = whole.said()
        self._key = _key(self.wanted, None)
        self._folder = folder

    def shows(self, part: Part) -> Shown | None:
        """Return what a part shows if it shows the incident, else None."""
        self.replays += 1
        found = show_part(part, self._folder)
        same = any(_key(row, part.numbers) == self._key for row in found.incidents)
        return found if same and found.said() <= self._said else None

    def without_oracle(self, part: Part) -> Shown | None:
        """Return what a part without a token oracle shows if it is the same incident, whose words then are those wanted.

        Tokens will be salted, and no oracle foretells these; what it said of a token is in the words with it only.
        """
        self.replays += 1
        found = show_part(part, self._folder)
        for row in found.incidents if found.said() <= self._said else ():
            if all(row[name] == self.wanted[name] for name in _SAME_WITHOUT_ORACLE):
                self.wanted, self._key = row, _key(row, part.numbers)
                return found
        return None


def _key(row: dict[str, Any], numbers: Sequence[int] | None) -> Row:
    """What an incident is known by; `numbers` are those of its trace's events in the whole trace."""

    def whole(event: int) -> int:
        return event if numbers is None or not 0 <= event < len(numbers) else numbers[event]

    said = re.sub(r"event (\d+)", lambda found: f"event {whole(int(found[1]))}", row["sentence"])
    said = re.sub(r"; the same \d+ more times?| and \d+ more\b", "", said)  # how often is not what
    return (*(row[name] for name in _SAME), whole(row["first_event"]), whole(row["cause_event"]), said)


def renamed_rows(shown: Shown, names: Names) -> list[Row]:
    """Return every row by what `names` calls its requests and slots, sorted; events keep their numbers."""

    def place(group: int, slot: int) -> int:
        space = names.space(group) if group >= 0 else 0  # a token's, where no pool is meant
        return int(names.slots(space, np.array([slot]))[0])

    def request(one: int) -> int:
        return names.requests.get(one, one)

    found: list[Row] = [(v[0], request(v[1]), v[2], place(*v[2:4]), *v[4:8], request(v[8])) for v in shown.violations]
    found += [(f[0], request(f[1]), f[2], place(*f[2:4]), *f[4:7], request(f[7]), f[8]) for f in shown.findings]
    return sorted(found, key=repr)
