"""The files of a report directory: those that grow during a replay, and the summary at its end."""

from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from ..recorder.header import TraceHeader
from .divergence import DIVERGENCE_SCHEMA
from .findings import FINDING_SCHEMA
from .merged.merging import MergingSink
from .summary import Summary
from .violations import VIOLATION_SCHEMA, TableSink


def write_summary(summary: Summary, report: Path) -> None:
    """Write a report's `summary.json` beside its place and rename it, so that a full disk leaves what was there.

    Raises:
        OSError: it cannot be written.
    """
    partial = report / "summary.json.partial"
    try:
        partial.write_text(summary.to_json_text(), encoding="utf-8")
        partial.replace(report / "summary.json")
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


class ReportSinks:
    """Violations, findings, and for traces with a full-to-SWA table the divergence figures; a context manager.

    `merging` takes the violations in place of `violations` where `merge`, the trace's header, is given and a folder.
    """

    def __init__(self, folder: Path | None, *, sliding: bool, merge: TraceHeader | None = None) -> None:
        path = folder / "violations.parquet" if folder else None
        self.merging = MergingSink(path, merge) if path is not None and merge is not None else None
        self.violations = TableSink(None if self.merging is not None else path, VIOLATION_SCHEMA)
        self.findings = TableSink(folder / "findings.parquet" if folder else None, FINDING_SCHEMA)
        path = folder / "swa_divergence.parquet" if folder and sliding else None
        self.divergence = TableSink(path, DIVERGENCE_SCHEMA)

    def close(self) -> None:
        """Write what is pending and the files' ends; every file is closed even where one cannot be written."""
        with ExitStack() as stack:
            for sink in (self.divergence, self.findings, self.violations, self.merging):
                if sink is not None:
                    stack.callback(sink.close)

    def __enter__(self) -> "ReportSinks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
