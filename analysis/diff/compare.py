"""Two traces in, one result out: each walked once, their facts spilled to disk and joined there by DuckDB."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import duckdb

from ...recorder.errors import TraceError
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.recordings import one_recording, recording_name
from ...replayer.run.streams import SegmentStream
from ..errors import AnalysisError
from ..store.connection import connect, private_folder, quoted
from .comparability import ComparisonPlan, plan_comparison
from .differences import Kept, find_differences
from .facts import FACTS, Sinks, Statements, number
from .observed_differences import find_observed
from .pairing import find_endings, find_timing, pair_requests
from .result import MAX_LISTED, Difference, DiffResult, Wording
from .settings import KINDS, DiffSettings, NotComparableError
from .walk import TraceTotals, TraceWalk

MEMORY_LIMIT: Final = "1GB"

Progress = Callable[[str, int, int], None]


def diff_traces(
    a: Path | Sequence[Path],
    b: Path | Sequence[Path],
    *,
    settings: DiffSettings | None = None,
    on_progress: Progress = lambda *_: None,
) -> DiffResult:
    """Compare two traces, each a file, a folder with the segments of one recording, or those segments; `a` is taken for right.

    `on_progress` is called with what is being done ("A", "B" or "joining"), bytes done, and bytes in all. Raises
    `NotComparableError`, and `AnalysisError` if a trace cannot be read or the temporary files cannot be written.
    """
    settings = settings or DiffSettings()
    try:
        files = [one_recording(trace) if isinstance(trace, Path) else trace for trace in (a, b)]
        headers = (_header(files[0]), _header(files[1]))
        plan = plan_comparison(*headers, settings)
        with ExitStack() as resources:
            folder = Path(resources.enter_context(private_folder()))
            totals = (
                _walk(files[0], headers[0], plan, 0, folder, on_progress),
                _walk(files[1], headers[1], plan, 1, folder, on_progress),
            )
            on_progress("joining", 0, 0)
            names = [str(trace) if isinstance(trace, Path) else recording_name(trace) for trace in (a, b)]
            return _join(_connect(folder, resources), names, headers, plan, settings, totals)
    except TraceError as error:
        raise AnalysisError(str(error)) from None
    except OSError as error:
        raise AnalysisError(
            f"the comparison's temporary files cannot be written ({error.strerror or error}); set TMPDIR to a folder with "
            "room for about as much as both traces hold uncompressed"
        ) from None
    except duckdb.OutOfMemoryException as error:
        raise AnalysisError(f"no room for the join: {error}; narrow it with --requests, or --no-kv") from None


def _header(files: Sequence[Path]) -> TraceHeader:
    header = SegmentStream(files).header
    if header.segment is not None and header.segment.number:
        raise NotComparableError(
            f"{files[0]}: segment {header.segment.number} of a recording; what it begins with was written before it: compare "
            "whole recordings, from segment 0 on (a folder that holds one)"
        )
    return header


def _walk(
    files: Sequence[Path], header: TraceHeader, plan: ComparisonPlan, side: int, folder: Path, on_progress: Progress
) -> TraceTotals:
    size = sum(file.stat().st_size for file in files)
    with closing(Sinks(folder, "ab"[side])) as sinks:
        walk = TraceWalk(header, plan, side, sinks)
        walk.walk(files, lambda done: on_progress("AB"[side], done, size))
    return walk.summary


def _connect(folder: Path, resources: ExitStack) -> Any:
    connection = connect(":memory:", resources, MEMORY_LIMIT)
    connection.execute("set preserve_insertion_order = false")
    for side in ("a", "b"):
        for name in FACTS:
            path = quoted(str(folder / f"{side}_{name}.parquet"))
            connection.execute(f"create view {side}_{name} as from read_parquet({path})")
    return connection


def _join(
    connection: Any,
    traces: Sequence[str],
    headers: tuple[TraceHeader, TraceHeader],
    plan: ComparisonPlan,
    settings: DiffSettings,
    totals: tuple[TraceTotals, TraceTotals],
) -> DiffResult:
    whole = (totals[0].complete and not totals[0].doubts, totals[1].complete and not totals[1].doubts)
    pairing = pair_requests(
        connection, settings, hand_over=plan.hand_over, whole=all(whole), hashed=headers[0].tokens == "hashed"
    )
    kept, notes = Kept(connection), list(plan.notes)
    compared = find_differences(connection, plan, settings, kept, whole=whole)
    find_observed(connection, plan, kept, totals, compared, notes, whole=all(whole))
    late = (totals[0].late_samples, totals[1].late_samples)
    unfinished = find_endings(connection, whole=whole, late=late, hand_over=plan.hand_over)
    timing = find_timing(connection, totals[0].modes, totals[1].modes, hand_over=plan.hand_over)
    if pairing.absent:
        notes.append(f"--requests: neither trace has a request {', '.join(pairing.absent)}")
    if unfinished:
        notes.append(f"{unfinished:,} requests had not ended in one of the traces: compared as far as both go")
    for name, walk in zip("AB", totals, strict=True):
        if walk.assumed:
            notes.append(f"{walk.assumed:,} entries of {name} that were received or lost are taken for right")
    counts = dict(connection.execute("select kind, count(*) from firsts group by kind").fetchall())
    kinds = ", ".join(quoted(kind) for kind in sorted(settings.kinds)) or "''"
    connection.execute(f"delete from firsts where kind not in ({kinds})")
    return DiffResult(
        a=traces[0],
        b=traces[1],
        headers=(_described(headers[0]), _described(headers[1])),
        settings=settings.to_json(),
        pairing=pairing,
        totals=totals,
        compared=compared,
        counts=counts,
        counted=settings.kinds,
        num_different=number(connection, "select count(distinct pair) from firsts where pair <> -1"),
        requests=_requests(connection, Wording(connection, headers, plan)),
        timing=timing,
        notes=tuple(notes),
    )


def _described(header: TraceHeader) -> dict[str, Any]:
    parts = {name: dataclasses.asdict(getattr(header, name)) for name in ("engine", "model", "ranks")}
    return {**parts, "role": header.role}


def _requests(connection: Any, wording: Wording) -> tuple[tuple[Difference, ...], ...]:
    places = " ".join(f"when '{kind}' then {place}" for place, kind in enumerate(KINDS))
    found: dict[Any, list[Difference]] = {}
    # pair is -1 for what no request of both traces can be blamed for
    for row in Statements(connection, "differences").rows("first_pairs", places=places, limit=MAX_LISTED):
        found.setdefault(row["pair"], []).append(wording.difference(row))
    return tuple(tuple(differences) for differences in found.values())
