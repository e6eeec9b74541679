"""What is fuzzed: each target reads bytes as a stranger sent them, and may raise the errors that it documents, no others."""

import json
import random
import shutil
import struct
import tempfile
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Final

from kvcanary.analysis.errors import AnalysisError
from kvcanary.analysis.incidents.finding import find_incidents, incidents_fit, read_incidents, write_incidents
from kvcanary.analysis.page.ask import Limits
from kvcanary.analysis.page.build import page_document
from kvcanary.analysis.page.content import page_content
from kvcanary.analysis.store.session import open_sources
from kvcanary.analysis.store.sources import find_sources
from kvcanary.recorder.engines.simulated.config import WorkloadError
from kvcanary.recorder.engines.simulated.workloads import FileWorkload
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.files import tail_paths
from kvcanary.recorder.trace.header import TraceHeader
from kvcanary.recorder.trace.inspect import inspect_trace
from kvcanary.recorder.trace.reader import TraceBatch, TraceReader
from kvcanary.recorder.trace.schema import trace_schema
from kvcanary.recorder.trace.tail_reader import HEADER_BYTES, STATE, STATE_AT, TailReader, tail_header
from kvcanary.recorder.writing.tail import open_tail
from kvcanary.replayer.report.report import check_report_folder
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .inputs import (
    EDIT,
    SEED_BYTES,
    Base,
    bases,
    bent,
    edited,
    random_program,
    seeds,
    with_right_crcs,
    with_right_tail_crcs,
    write_trace,
)


class Target(ABC):
    """One kind of input: what it begins with, how it is changed, and what is done with it.

    `allowed` are the errors that users are told of; `folder` is this process's own, in memory where there is such a place.
    """

    name: ClassVar[str]
    allowed: ClassVar[tuple[type[Exception], ...]] = (TraceError,)
    max_bytes: ClassVar[int] = SEED_BYTES
    share: ClassVar[float]  # of all executions

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def execute(self, data: bytes) -> None:
        """Do with an input what a user does."""

    def seeds(self) -> list[bytes]:
        """Return inputs to begin with."""
        return seeds(self.name)

    def bend(self, data: bytes, rng: random.Random) -> bytes:
        """Return a changed input."""
        return bent(data, rng, self.max_bytes)

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """Return a changed input with what would be refused at once put right, where this target does that."""
        return data


class Header(Target):
    """The JSON of a trace's header."""

    name = "header"
    share = 0.5

    def seeds(self) -> list[bytes]:
        return [base.header.to_json().encode() for base in bases(self.folder)] + super().seeds()

    def execute(self, data: bytes) -> None:
        header = TraceHeader.from_json(data)
        assert TraceHeader.from_json(header.to_json()) == header


class Reader(Target):
    """A trace file, with CRCs that hold in half of all cases."""

    name = "reader"
    share = 0.1

    def seeds(self) -> list[bytes]:
        found = []
        for base in bases(self.folder)[:4]:
            write_trace(self.folder / "seed.arrow", base.header, list(base.events[:4]))
            found.append((self.folder / "seed.arrow").read_bytes())
        return found + super().seeds()

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        return with_right_crcs(data) if rng.random() < 0.5 else data

    def execute(self, data: bytes) -> None:
        path = self.folder / "t.arrow"
        path.write_bytes(data)
        with TraceReader(path) as reader:
            for item in reader.stream():
                if isinstance(item, TraceBatch):
                    for view in item:
                        view.ints("input_ids")
        if data[-1:] < b"\x20":
            inspect_trace(path)


class Tail(Target):
    """The tail beside a trace."""

    name = "tail"
    allowed = ()
    share = 0.25

    def seeds(self) -> list[bytes]:
        found = []
        for base in bases(self.folder)[:5]:
            path = self.folder / "seed.arrow"
            tail = open_tail(path, "0123")
            assert tail is not None
            for number, event in enumerate(base.events[:6]):
                tail.put(number, 100, event)
            found.append(tail_paths(path)[0].read_bytes())
            tail.remove()
        return found + super().seeds()

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        return with_right_tail_crcs(data)

    def execute(self, data: bytes) -> None:
        path = self.folder / "tailed.arrow"
        head = tail_header("0123")
        whole = head.ljust(STATE_AT, b"\0") + STATE.pack(-1) + data[HEADER_BYTES:]
        half = len(whole) // 2
        for place, content in zip(tail_paths(path), (whole, head + data[half:]), strict=True):
            place.write_bytes(content)
        for _ in TailReader(path, "0123").events(0):
            pass
        if data[-1:] >= b"\x08":  # as batches one in thirty: most of the time would go into making Arrow columns
            return
        for item in TailReader(path, "0123").batches(0, 0, trace_schema()):
            if isinstance(item, TraceBatch):
                item.record_batch.validate(full=True)


class Workload(Target):
    """A workload file: the first byte says which kind."""

    name = "workload"
    allowed = (WorkloadError,)
    share = 0.1415
    max_bytes = 1 << 12

    def execute(self, data: bytes) -> None:
        path = self.folder / ("w.csv" if data[:1] == b"c" else "w.jsonl")
        path.write_bytes(data[1:])
        workload = FileWorkload(path=path, limit=8)
        if workload.longest() < 20_000:
            for spec in workload:
                assert len(spec.prompt)


class Events(Target):
    """Events with hostile columns and right CRCs, through reader and replay: edits of traces of every kind."""

    name = "events"
    share = 0.008
    max_bytes = 2 + 24 * EDIT.size

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._bases: list[Base] = []

    def seeds(self) -> list[bytes]:
        rng = random.Random(5)
        return [bytes((n, 0)) + random_program(rng, 3) for n in range(9)] + super().seeds()

    def bend(self, data: bytes, rng: random.Random) -> bytes:
        draw = rng.random()
        if draw < 0.4:
            return bytes((rng.randrange(256), rng.randrange(256))) + random_program(rng, rng.choice((1, 1, 2, 4, 12)))
        if draw < 0.7 and len(data) > 2:
            at = 2 + rng.randrange((len(data) - 2) // EDIT.size + 1) * EDIT.size
            return (data[:at] + random_program(rng, 1) + data[at + EDIT.size :])[: self.max_bytes]
        return super().bend(data, rng)

    def execute(self, data: bytes) -> None:
        self._bases = self._bases or bases(self.folder)
        if len(data) < 2:
            return
        base = self._bases[data[0] % len(self._bases)]
        events = edited(base, data[2:])
        path = self.folder / "e.arrow"
        flags = data[1]
        try:
            write_trace(path, base.header, events, batches=1 + flags % 3)
        except (ValueError, OverflowError, struct.error):  # no trace holds such an event
            return
        found = [
            replay(path, settings=ReplaySettings(executor=executor), report=None)
            for executor in (("interval", "stepwise") if flags & 8 else ("interval",))
        ]
        told = {
            json.dumps(
                [one.verdict.value, one.violations, one.findings, one.findings_by_kind, one.num_gaps], sort_keys=True
            )
            for one in found
        }
        assert len(told) == 1, f"the executors differ: {sorted(told)}"


REPORT_FILES: Final = (
    *("summary.json", "violations.parquet", "findings.parquet", "incidents.parquet", "incident_members.parquet"),
    "swa_divergence.parquet",
)


class Report(Target):
    """A report folder of which one file is another's: the first byte says which, what follows is the file."""

    name = "report"
    allowed = (TraceError, AnalysisError)
    share = 0.0005

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._whole = folder / "whole"

    def _made(self) -> Path:
        if not self._whole.is_dir():
            base = bases(self.folder)[1]
            self._whole.mkdir()
            write_trace(self._whole / "t.arrow", base.header, list(base.events))
            report = self._whole / "t.report"
            report.mkdir()
            replay(self._whole / "t.arrow", settings=ReplaySettings(), report=report)
            write_incidents(report, find_incidents(report, [self._whole / "t.arrow"]))
        return self._whole

    def seeds(self) -> list[bytes]:
        report = self._made() / "t.report"
        return [
            bytes((number,)) + (report / name).read_bytes()
            for number, name in enumerate(REPORT_FILES)
            if (report / name).exists()
        ] + super().seeds()

    def execute(self, data: bytes) -> None:
        sent = self.folder / "sent"
        shutil.rmtree(sent, ignore_errors=True)
        shutil.copytree(self._made(), sent)
        report = sent / "t.report"
        if data:
            (report / REPORT_FILES[data[0] % len(REPORT_FILES)]).write_bytes(data[1:])
        check_report_folder(report)
        with ExitStack() as stack:
            sources = find_sources([report])
            if incidents_fit(report):
                read_incidents(report)
            session = stack.enter_context(open_sources(sources, use_store=False, memory_limit="1GB"))
            for name in ("violations", "findings", "forwards"):
                session.sql(f"from {name} limit 100")
            if not len(data) % 8:
                page_document(page_content(session, sources[0], Limits()), "")
        find_incidents(report, list(sources[0].files))


TARGETS: Final[tuple[type[Target], ...]] = (Header, Reader, Tail, Workload, Events, Report)


def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory, where the machine has such a place."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="kvcanary-fuzz-", dir=memory if memory.is_dir() else None)
