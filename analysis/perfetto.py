"""A trace as Perfetto's UI shows it: forwards, requests, slots, damage and incidents over time."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from ..recorder.files import replacing
from .errors import AnalysisError
from .store.library import sql_file
from .store.session import open_sources
from .store.sources import Source

_SHORTEST_NS: Final = 1_000  # of a slice, so that it can be seen
_SEQUENCE: Final = 1

_Row = dict[str, Any]


def export_perfetto(sources: Sequence[Source], output: Path) -> int:
    """Write traces, with their incidents if they were replayed, as a Perfetto trace file; return how many packets it has.

    Raises:
        AnalysisError: perfetto's package is missing, the traces cannot be read, or hold no forward with a time.
    """
    try:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ModuleNotFoundError:
        raise AnalysisError("the export needs perfetto's package: pip install 'kvcanary[replay]'") from None
    with open_sources(sources) as session, replacing(output) as file:
        tracks = _Tracks(StreamingTraceProtoBuilder(file))
        rows = {name: session.sql(sql_file("perfetto", name).sql).to_pylist() for name in _QUERIES}
        if not rows["forwards"]:
            raise AnalysisError("no forward there has a time: nothing to show on a time line")
        for number, source in enumerate(dict.fromkeys(row["trace"] for row in rows["forwards"]), 1):
            _one_trace(
                tracks,
                number,
                source,
                {name: [row for row in found if row["trace"] == source] for name, found in rows.items()},
            )
        return tracks.num_packets


_QUERIES: Final = (
    "forwards", "requests", "slots_held", "evicted", "damage", "incidents", "incident_requests",
)  # fmt: skip


class _Tracks:
    """Writes tracks and what stands on them, a packet each."""

    def __init__(self, builder: Any) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        self._types = perfetto_trace_pb2.TrackEvent
        self._builder = builder
        self._uuids = itertools.count(1)
        self.num_packets = 0

    def track(self, name: str, parent: int | None = None, *, counter: bool = False, process: int = 0) -> int:
        """Add a track, and return its number."""
        packet = self._packet()
        described = packet.track_descriptor
        described.uuid = next(self._uuids)
        if parent is not None:
            described.parent_uuid = parent
        if process:
            described.process.pid, described.process.process_name = process, name
        else:
            described.name = name
        if counter:
            described.counter.SetInParent()
        self._write(packet)
        return int(described.uuid)

    def slice(self, track: int, name: str, start_ns: int, end_ns: int, facts: _Row) -> None:
        """Put something that lasts on a track; slices of one track must not overlap."""
        self._event(track, start_ns, self._types.TYPE_SLICE_BEGIN, name, facts)
        self._event(track, max(end_ns, start_ns + 1), self._types.TYPE_SLICE_END)

    def instant(self, track: int, name: str, at_ns: int, facts: _Row) -> None:
        """Put something that happened on a track."""
        self._event(track, at_ns, self._types.TYPE_INSTANT, name, facts)

    def count(self, track: int, at_ns: int, value: int) -> None:
        """Set a counter."""
        packet = self._packet(at_ns)
        event = packet.track_event
        event.type, event.track_uuid, event.counter_value = self._types.TYPE_COUNTER, track, value
        self._write(packet)

    def _event(self, track: int, at_ns: int, kind: int, name: str = "", facts: _Row | None = None) -> None:
        packet = self._packet(at_ns)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
        for key, value in (facts or {}).items():
            if value is None:
                continue
            note = event.debug_annotations.add()
            note.name = key
            if isinstance(value, int):
                note.int_value = value
            elif isinstance(value, float):
                note.double_value = value
            else:
                note.string_value = str(value)
        self._write(packet)

    def _packet(self, at_ns: int | None = None) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if at_ns is not None:
            packet.timestamp = at_ns
        return packet

    def _write(self, packet: Any) -> None:
        self._builder.write_packet(packet)
        self.num_packets += 1


def _one_trace(tracks: _Tracks, number: int, name: str, rows: dict[str, list[_Row]]) -> None:
    root = tracks.track(name, process=number)
    for runner, forwards in _by(rows["forwards"], "runner"):
        track = tracks.track("forwards" if runner == 0 else f"forwards of runner {runner}", root)
        tokens = tracks.track(
            "tokens a forward" if runner == 0 else f"tokens a forward of runner {runner}", root, counter=True
        )
        for row, after in itertools.zip_longest(forwards, forwards[1:]):
            # Nobody records when a forward ends: it is shown up to the next one.
            end = after["time_ns"] if after else row["time_ns"] + _SHORTEST_NS
            tracks.slice(track, f"{row['mode']} {row['forward']}", row["time_ns"], end, _facts(row))
            tracks.count(tokens, row["time_ns"], row["num_tokens"] - row["num_padding"])
    _incidents(tracks, root, rows["incidents"])
    held = "held" if all(row["has_history"] for row in rows["slots_held"]) else "written"
    for label, found, key, value in (
        (f"slots {held}, group {{}}", rows["slots_held"], "pool_group", "held"),
        ("slots evicted, group {}", rows["evicted"], "pool_group", "slots"),
        ("{}s", rows["damage"], "source", "found"),
    ):
        for which, counts in _by(found, key):
            track = tracks.track(label.format(which), root, counter=True)
            for row in counts:
                tracks.count(track, row["time_ns"], row[value])
    hit: dict[int, list[int]] = {}
    for row in rows["incident_requests"]:
        hit.setdefault(row["request_id"], []).append(row["incident"])
    _requests(tracks, root, rows["requests"], hit)


def _incidents(tracks: _Tracks, root: int, incidents: Sequence[_Row]) -> None:
    track = tracks.track("incidents", root) if incidents else 0
    for row in incidents:
        tracks.instant(track, f"#{row['incident']} {row['title']}", row["time_ns"], _facts(row))


def _requests(tracks: _Tracks, root: int, requests: Sequence[_Row], hit: dict[int, list[int]]) -> None:
    """Put requests on as few tracks as hold them without two at once, those that an incident hit on tracks of their own."""
    group = tracks.track("requests", root)
    for named, chosen in (
        ("hit", lambda row: row["request_id"] in hit),
        ("request", lambda row: row["request_id"] not in hit),
    ):
        free: list[tuple[int, int]] = []  # until when a track is taken, and the track
        for row in filter(chosen, requests):
            end = max(row["to_ns"], row["from_ns"] + _SHORTEST_NS)
            is_free = free and free[0][0] <= row["from_ns"]
            track = heapq.heappop(free)[1] if is_free else tracks.track(named, group)
            heapq.heappush(free, (end, track))
            facts = _facts(row)
            if row["request_id"] in hit:
                facts["incidents"] = ", ".join(f"#{number}" for number in hit[row["request_id"]])
            tracks.slice(track, row["name"] or str(row["request_id"]), row["from_ns"], end, facts)


def _by(rows: Sequence[_Row], key: str) -> Iterator[tuple[Any, list[_Row]]]:
    for which, found in itertools.groupby(rows, itemgetter(key)):
        yield which, list(found)


def _facts(row: _Row) -> _Row:
    return {
        key: value for key, value in row.items() if key not in ("trace", "time_ns", "from_ns", "to_ns", "title", "name")
    }
