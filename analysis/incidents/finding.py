"""A report's incidents: found, written, read back."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...kernels.arrays import Int64Array
from ...recorder.errors import TraceError
from ...recorder.files import is_regular, new_private_file, partial_path
from ...recorder.remote import arrow_file
from ...recorder.trace.files import split_segment_name
from ...recorder.trace.header import PoolGroup
from ...recorder.trace.reader import TraceReader
from ...replayer.report.report import check_report_folder
from ...replayer.report.violations import PARQUET_ERRORS
from ..errors import AnalysisError
from .alike import KnownBugs, known_bugs
from .building import incident_rows
from .facts import HANDED_IN, MAX_PLACES, Facts
from .gathering import gather
from .linking import NamedSlots, link, merge
from .places import FINDING, MAX_HELD_PLACES, Places, iter_rows, place_keys, read_places
from .ranking import Ranked, make_clusters, rank
from .schema import INCIDENT_SCHEMA, INCIDENTS_NAME, MEMBER_SCHEMA, MEMBERS_NAME, STAMP_KEY

TRANSFER_DIFFERS, OUT_OF_POOL, ATTENTION_SLOTS = "transfer_differs", "slot_out_of_pool", "attention_slots"
_SOURCES = pa.array(["violation", "finding"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """A report's incidents: `rows` as in `INCIDENT_SCHEMA`, to which of them each place of the report belongs, and what each
    is judged by.
    """

    rows: list[dict[str, Any]]
    places: Places
    of_place: Int64Array
    leads: list[Ranked]


def find_incidents(
    report: Path,
    traces: Sequence[Path],
    *,
    max_places: int = MAX_HELD_PLACES,
    without: Collection[str] = (),
    known: KnownBugs | None = None,
) -> Incidents:
    """Find the incidents of a report, holding `max_places` places at most; `without` are kinds whose rules are left out.

    `known` are the bugs that incidents are compared with, None for all. `traces` are its trace, or the segments of it; none if
    it is not at hand, which makes the kinds less certain.

    Raise `AnalysisError` if the report's files are missing or damaged.
    """
    places = read_places(report, limit=max_places)
    return incidents_of(report, places, gathered(traces, places), without, known)


def gathered(traces: Sequence[Path], places: Places) -> Facts | None:
    """Return what traces tell about a report's places; None of a report that has none.

    Raise `AnalysisError` if a trace cannot be read.
    """
    try:
        return gather(traces, places) if len(places) else None
    except TraceError as error:
        raise AnalysisError(str(error)) from None


def incidents_of(
    report: Path, places: Places, facts: Facts | None, without: Collection[str] = (), known: KnownBugs | None = None
) -> Incidents:
    """Return the incidents of a report by what is known of its places.

    `without` are kinds whose rules are left out, `known` the bugs that incidents are compared with, None for all.
    """
    if facts is None:
        return Incidents(rows=[], places=places, of_place=np.zeros(0, np.int64), leads=[])
    groups = facts.header.groups if facts.header is not None else ()
    clusters = link(places, groups, list(_named(places, facts, groups)))
    ranked = [rank(cluster, without) for cluster in make_clusters(report, places, clusters, facts)]
    incidents = merge(ranked, places, clusters)
    known = known_bugs() if known is None else known
    rows = incident_rows(places, clusters, incidents, ranked, facts, known)
    return Incidents(rows=rows, places=places, of_place=incidents[clusters], leads=_leads(ranked, incidents))


def _leads(ranked: list[Ranked], incidents: Int64Array) -> list[Ranked]:
    """Return the cluster by which each incident is judged, of those that have one."""
    first = np.unique(incidents[: len(ranked)], return_index=True)[1]
    return [ranked[n] for n in first.tolist()]


def trace_files(trace: Path, trace_id: str) -> list[Path]:
    """Return a trace's file, or, where it was recorded in segments, all that can be read there, in order; [] for none.

    Files that only have its name, with another id, are left out, and so are those of which nothing can be read.
    """
    if trace.is_file() and _is_of(trace, trace_id):
        return [trace]
    found = []
    if trace.parent.is_dir():
        for path in trace.parent.iterdir():
            split = split_segment_name(path)
            if split is not None and f"{split[0]}.arrow" == trace.name and _is_of(path, trace_id):
                found.append((split[1], path))
    return [path for _, path in sorted(found)]


def _is_of(path: Path, trace_id: str) -> bool:
    try:
        with TraceReader(path) as reader:
            return reader.header.trace_id == trace_id
    except TraceError:
        return False


def write_incidents(report: Path, found: Incidents) -> None:
    """Write `incidents.parquet` and `incident_members.parquet` into a report.

    Raise `AnalysisError` if they cannot be written, or the report changed meanwhile.
    """
    schema = INCIDENT_SCHEMA.with_metadata({STAMP_KEY: _stamp(report)})
    members, rows = (partial_path(report / name) for name in (MEMBERS_NAME, INCIDENTS_NAME))
    try:
        check_report_folder(report)
        with new_private_file(members) as file, pq.ParquetWriter(file, MEMBER_SCHEMA, compression="zstd") as writer:
            for table in member_tables(report, found):
                writer.write_table(table)
        with new_private_file(rows) as file:
            pq.write_table(pa.Table.from_pylist(found.rows, schema=schema), file, compression="zstd")
        members.replace(report / MEMBERS_NAME)
        rows.replace(report / INCIDENTS_NAME)
    except OSError as error:
        raise AnalysisError(f"{report}: incidents cannot be written ({error.strerror or error})") from None
    finally:
        for partial in (members, rows):
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def read_incidents(report: Path) -> list[dict[str, Any]] | None:
    """Return a report's incidents as they were written, None if they are not there, damaged, or of another replay."""
    if not incidents_fit(report):
        return None
    try:
        return list(_opened(report / INCIDENTS_NAME, pq.read_table).to_pylist())
    except PARQUET_ERRORS:
        return None


def incidents_fit(report: Path) -> bool:
    """Whether a report has incidents, made of the violations and findings that it has now."""
    if not (is_regular(report / INCIDENTS_NAME) and is_regular(report / MEMBERS_NAME)):
        return False
    try:
        schema, members = (_opened(report / name, pq.read_schema) for name in (INCIDENTS_NAME, MEMBERS_NAME))
    except PARQUET_ERRORS:
        return False
    fits = schema.equals(INCIDENT_SCHEMA) and members.equals(MEMBER_SCHEMA)
    return fits and (schema.metadata or {}).get(STAMP_KEY) == _stamp(report)


def _opened(path: Path, read: Callable[[Any], Any]) -> Any:
    with arrow_file(path) as file:
        return read(file)


def _stamp(report: Path) -> bytes:
    sizes = {}
    for name in ("violations", "findings"):
        path = report / f"{name}.parquet"
        try:
            sizes[name] = [path.stat().st_size, _opened(path, pq.read_metadata).num_rows]
        except PARQUET_ERRORS:
            sizes[name] = []
    return json.dumps(sizes).encode()


def _named(places: Places, facts: Facts, groups: Sequence[PoolGroup]) -> Iterator[NamedSlots]:
    """The slots of the events behind findings about more than one slot, the full slots of sliding-window ones, where went
    what a request has written and its row does not name, and for which slot bytes were handed in that came to another.
    """
    chosen = np.flatnonzero((places["source"] == FINDING) & np.isin(places["event"], list(facts.named)))
    for place in chosen.tolist():
        group = int(places["group"][place])
        slots = facts.named[int(places["event"][place])].get(group)
        if slots is not None:
            if places.kinds[int(places["what"][place])] == TRANSFER_DIFFERS and group < len(groups):
                slots = _with_neighbours(slots, groups[group])
            yield NamedSlots(place=place, group=group, slots=slots)
    for place in range(min(len(places), MAX_PLACES)):
        group = int(places["group"][place])
        kind = places.kinds[int(places["what"][place])] if places["source"][place] == FINDING else ""
        if kind in (OUT_OF_POOL, ATTENTION_SLOTS):
            request, position, event = (int(places[name][place]) for name in ("request", "position", "event"))
            # Of what attention looks for elsewhere it is the forward's own write.
            written = facts.wrote_before(request, position, event + (kind == ATTENTION_SLOTS))
            if written is not None:
                yield NamedSlots(place=place, group=group, slots=np.array(written[1:], np.int64))
        history = facts.of(group, int(places["slot"][place]), upto=int(places["event"][place]))
        for strayed in {fact.twin for fact in history if fact.twin_kind == HANDED_IN}:
            yield NamedSlots(place=place, group=strayed[0], slots=np.array(strayed[1:], np.int64))
        if not 0 <= group < len(groups) or groups[group].lut < 0:
            continue
        full = [fact.via for fact in history if fact.what == "written"][-2:]
        if full:
            yield NamedSlots(place=place, group=-1 - groups[group].table, slots=np.array(full, np.int64))


def _with_neighbours(slots: Int64Array, group: PoolGroup) -> Int64Array:
    """Slots and those one page on either side: what did not land where it should landed beside."""
    near = np.unique(np.concatenate([slots - group.page_size, slots, slots + group.page_size]))
    return near[(near > 0) & (near < group.num_slots)]


def member_tables(report: Path, found: Incidents) -> Iterator[pa.Table]:
    """Yield each row's incident as in `MEMBER_SCHEMA`, in the order of the files; raise `AnalysisError`."""
    keys = found.places["key"].view(np.uint64)
    order = np.argsort(keys)
    keys, of_key = keys[order], found.of_place[order]
    kinds = {kind: number for number, kind in enumerate(found.places.kinds)}
    for columns in iter_rows(report, kinds):
        mine = place_keys(columns, found.places.shift)
        at = np.minimum(np.searchsorted(keys, mine), max(len(keys) - 1, 0))
        if len(mine) and (not len(keys) or bool((keys[at] != mine).any())):
            raise AnalysisError(f"{report}: changed while it was read; run kvcanary incidents again")
        source = pa.DictionaryArray.from_arrays(pa.array(columns["source"].astype(np.int8)), _SOURCES)
        incident = pa.array((of_key[at] + 1).astype(np.int32))
        yield pa.table([source, pa.array(columns["row"]), incident], schema=MEMBER_SCHEMA)
