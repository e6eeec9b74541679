"""The files of a report directory that grow during a replay."""

from pathlib import Path
from types import TracebackType

from .divergence import DIVERGENCE_SCHEMA
from .findings import FINDING_SCHEMA
from .violations import VIOLATION_SCHEMA, TableSink


class ReportSinks:
    """Violations, findings, and for traces with a full-to-SWA table the divergence figures; a context manager."""

    def __init__(self, folder: Path | None, *, sliding: bool) -> None:
        self.violations = TableSink(folder / "violations.parquet" if folder else None, VIOLATION_SCHEMA)
        self.findings = TableSink(folder / "findings.parquet" if folder else None, FINDING_SCHEMA)
        path = folder / "swa_divergence.parquet" if folder and sliding else None
        self.divergence = TableSink(path, DIVERGENCE_SCHEMA)

    def close(self) -> None:
        """Write what is pending and the files' ends; every file is closed even where one cannot be written."""
        try:
            self.violations.close()
        finally:
            try:
                self.findings.close()
            finally:
                self.divergence.close()

    def __enter__(self) -> "ReportSinks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
