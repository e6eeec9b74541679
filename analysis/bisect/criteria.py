"""What makes a trace bad: anything found, one kind of thing found, a difference from a reference, or an SQL condition."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...recorder.errors import TraceError
from ...recorder.remote import as_path
from ...recorder.trace.reader import TraceReader
from ...recorder.trace.recordings import group_recordings
from ...replayer.checks import FINDING_KINDS
from ...replayer.report.summary import Summary, Verdict
from ...replayer.run.replay import replay_joined
from ...replayer.run.settings import ReplaySettings
from ..diff.compare import diff_traces
from ..diff.result import DIFFERENT, SAME
from ..diff.settings import DiffSettings
from ..errors import AnalysisError
from ..finishing import finish
from ..incidents.rules import RULES, UNKNOWN
from ..store.session import open_sources
from ..store.sources import find_sources
from .search import BisectVerdict, Mark

ANY, INCIDENT, FINDING, REFERENCE, SQL = "any", "incident", "finding", "reference", "sql"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What makes a trace bad.

    `kind` is "any" (violation or finding), "incident" or "finding" (`value` names which), "reference" (it differs from
    the trace `value`), or "sql" (`value` is a query whose first value is true or not 0). `kv` says whether a reference's
    KV bytes are compared, `kv_tolerance` how.
    """

    kind: str = ANY
    value: str = ""
    kv: bool = True
    kv_tolerance: float | None = None

    def check(self) -> None:
        """Raise `AnalysisError` if no trace could ever be bad by it."""
        known = {INCIDENT: [*RULES, UNKNOWN], FINDING: list(FINDING_KINDS)}.get(self.kind)
        if known is not None and self.value not in known:
            raise AnalysisError(f"no {self.kind} of kind {self.value!r}; there are {', '.join(sorted(known))}")
        if self.kind == REFERENCE:
            try:
                TraceReader(Path(self.value)).close()
            except TraceError as error:
                raise AnalysisError(f"--reference: {error}") from None

    def key(self) -> str:
        """Return text that is the same only for what judges alike."""
        fields: dict[str, Any] = asdict(self)
        if self.kind == REFERENCE:
            fields["value"] = content_hash(Path(self.value))
        return json.dumps(fields, sort_keys=True)

    def words(self) -> str:
        """Say what makes a trace bad."""
        return {
            ANY: "any violation or finding",
            INCIDENT: f"an incident of kind {self.value}",
            FINDING: f"a finding of kind {self.value}",
            REFERENCE: f"a difference from {self.value}",
            SQL: f"the SQL condition {self.value}",
        }[self.kind]


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file; raise `AnalysisError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read ({error.strerror or error})") from None


def judge_traces(traces: Sequence[Path], criterion: Criterion) -> BisectVerdict:
    """Judge what one run of an engine recorded, the traces of its ranks or of a pair; an unreadable one is skipped."""
    if not traces:
        return BisectVerdict(mark=Mark.SKIP, words="no trace was recorded")
    try:
        if criterion.kind == REFERENCE:
            return _against_reference(traces, criterion)
        with TemporaryDirectory(prefix="kvcanary-bisect-") as folder:
            return _replayed(traces, criterion, Path(folder))
    except TraceError as error:
        return BisectVerdict(mark=Mark.SKIP, words=str(error))


def _against_reference(traces: Sequence[Path], criterion: Criterion) -> BisectVerdict:
    doubts = []
    settings = DiffSettings(kv=criterion.kv, kv_tolerance=criterion.kv_tolerance)
    for recording in group_recordings(traces)[0]:
        try:
            result = diff_traces(as_path(criterion.value), recording.paths, settings=settings)
        except AnalysisError as error:
            doubts.append(str(error))
            continue
        if result.verdict == DIFFERENT and result.first is not None:
            first = result.first
            words = f"{first.kind}: request {first.request or first.partner}: {first.words}"
            return BisectVerdict(mark=Mark.BAD, words=words, seen={"first": asdict(first), "trace": recording.name})
        doubts += result.doubts if result.verdict != SAME else []
    if doubts:
        return BisectVerdict(mark=Mark.SKIP, words="; ".join(doubts))
    return BisectVerdict(mark=Mark.GOOD, words="no request differs from the reference")


def _replayed(traces: Sequence[Path], criterion: Criterion, folder: Path) -> BisectVerdict:
    summaries: list[Summary] = []
    recordings = group_recordings(traces)[0]
    # Prefill and decode sides are replayed together, others alone.
    pair = [one.paths for one in recordings if one.header is not None and one.header.role]
    alone = [[one.paths] for one in recordings if one.header is None or not one.header.role]
    for number, joined in enumerate([pair, *alone] if pair else alone):
        reports = [folder / f"{number}-{i}.report" for i in range(len(joined))]
        for report in reports:
            report.mkdir()
        summaries += replay_joined(joined, settings=ReplaySettings(), reports=reports)
    missing = [said for summary in summaries if (said := finish(summary))]
    corrupt = [summary for summary in summaries if summary.verdict is Verdict.CORRUPT]
    doubts = [doubt for summary in summaries for doubt in summary.doubts]
    doubts += missing if criterion.kind in (INCIDENT, SQL) else []  # without its incidents a trace is not good
    hit = [summary for summary in (summaries if criterion.kind == SQL else corrupt) if _is_bad(summary, criterion)]
    if hit:
        return BisectVerdict(mark=Mark.BAD, words=_words(hit[0], criterion), seen=_seen(hit[0]))
    if doubts:
        return BisectVerdict(mark=Mark.SKIP, words="; ".join(doubts[:3]))
    found = f"   (something else was found: {_words(corrupt[0], Criterion())})" if corrupt else ""
    return BisectVerdict(mark=Mark.GOOD, words=f"not {criterion.words()}{found}" if found else "clean")


def _is_bad(summary: Summary, criterion: Criterion) -> bool:
    if criterion.kind == FINDING:
        return criterion.value in summary.findings_by_kind
    if criterion.kind == INCIDENT:
        return any(incident["kind"] == criterion.value for incident in summary.incidents)
    if criterion.kind == SQL:
        trace = as_path(summary.trace)  # of several segments there is no such file
        sources = find_sources([Path(summary.report or "")], trace=trace if trace.is_file() else None)
        with open_sources(sources) as session:
            rows = session.sql(criterion.value)
        if not rows.num_columns:
            raise AnalysisError(f"--sql {criterion.value!r}: no query; expected one whose first value is true or false")
        return bool(rows.num_rows and rows.column(0)[0].as_py())
    return True


def _words(summary: Summary, criterion: Criterion) -> str:
    incidents = [i for i in summary.incidents if criterion.kind != INCIDENT or i["kind"] == criterion.value]
    parts = ["the SQL condition holds"] if criterion.kind == SQL else []
    if incidents:
        first = incidents[0]
        parts.append(f"incident {first['kind']} (confidence {first['confidence']}): {first['sentence']}")
    violation, finding = summary.first_violation, summary.first_finding
    if violation is not None:
        request = f", request {violation['request']}" if violation["request"] else ""
        what = f"{'+'.join(violation['reasons'])} in slot {violation['slot']}"
        parts.append(f"first violation in forward {violation['forward']}{request}: {what}")
    elif finding is not None:
        parts.append(f"first finding in forward {finding['forward']}: {finding['kind']}: {finding['detail']}")
    return "; ".join(parts)


def _seen(summary: Summary) -> dict[str, Any]:
    shown = ("kind", "confidence", "first_forward", "sentence")
    incidents = [{key: incident[key] for key in shown} for incident in summary.incidents[:5]]
    names = ("trace", "violations", "violations_by_reason", "findings_by_kind")
    return {**{name: getattr(summary, name) for name in names}, "incidents": incidents}
