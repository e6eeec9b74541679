"""The header that makes a trace explain itself: engine, model, pools, tables, runners, ranks, capture settings.

It travels as JSON under `kvcanary.header` in the Arrow schema's metadata.
"""

import dataclasses
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from ..errors import UnreadableTraceError, json_text, whole_text
from . import schema

Text = Annotated[str, msgspec.Meta(max_length=schema.MAX_TEXT_CHARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Which engine wrote the trace."""

    name: Text = "unknown"
    version: Text = ""
    commit: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Which model ran; names only, nothing is loaded from them."""

    name: Text = "unknown"
    dtype: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStream:
    """The captured bytes of one KV source: `capture_bytes` leading bytes of each slot of one layer's half.

    `origin` is "stored" when the bytes were read from the pool after the forward, "submitted" when they were taken
    from what the model handed to the cache. `layers`, if there are any, are several layers, of which `layer` is the first:
    the stream holds the leading bytes of each, one after another, and `bytes_per_token` counts all of them.
    """

    half: Text
    layer: int = 0
    layers: tuple[int, ...] = ()
    bytes_per_token: int
    capture_bytes: int
    origin: Text = "stored"

    def layer_of(self, byte: int) -> int:
        """Return the layer that a captured byte is of."""
        return self.layers[byte * len(self.layers) // self.capture_bytes] if self.layers else self.layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroup:
    """One KV pool group: a set of layers that share slots.

    `kind` is "full" or "swa"; `window` is the number of positions before the prefix's end that a forward reads (0
    for full). `table` indexes `TraceHeader.tables`, `lut` indexes `TraceHeader.lut_lens` (-1: slots are this pool's
    own). `reads_before_write` says that a forward reads its prefix before its own writes land (ring buffers).
    `host_num_slots` is the size of the offload tier, 0 without one. `padding_slots` take writes that nobody reads, and
    are never verified: what the engine says; the recorder numbers the slots so that a trace has `(0,)`, and `slot_shift`
    says by how much they are higher there than in the engine. `num_layers` is the number of layers whose KV lies in this
    group, 0 if unknown; the streams say which of them are watched.
    """

    name: Text
    kind: Text = "full"
    window: int = 0
    runner: int = 0
    table: int = 0
    lut: int = -1
    num_slots: int
    page_size: int = 1
    halves: tuple[Text, ...] = ("K", "V")
    streams: tuple[KvStream, ...] = ()
    reads_before_write: bool = False
    host_num_slots: int = 0
    padding_slots: tuple[int, ...] = (0,)
    slot_shift: int = 0
    num_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """The shape of one req_to_token table: `[rows, width] int32`."""

    name: Text = "req_to_token"
    rows: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A model runner; an EAGLE draft reads truth tokens at `token_offset` 1.

    `derived` names the columns of its forwards that the recorder worked out: replayed, and judged by nothing.
    """

    name: Text = "target"
    token_offset: int = 0
    derived: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotWatched:
    """Something that this recording does not look at: `what` is one of `NOT_WATCHED`, `name` the engine's word for it."""

    what: Text
    name: Text
    reason: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where in the parallel layout the recording process stood."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """The token oracle that sampled: kind "hash", over `vocab_size` tokens."""

    kind: Text = "hash"
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInfo:
    """How the trace was captured. `kv_watch_every`: prefix bytes re-read every N forwards, 0 never."""

    kv_watch_every: int = 0
    truth_tokens: bool = True
    flush_bytes: int = 0
    flush_interval_ns: int = 0
    compression: Text = "lz4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One of the files that a recording was cut into, all with one `trace_id`; `number` counts from 0.

    `first_event` is the number of the file's first event, `engine_events` how many of the engine's the files before hold.
    """

    number: int
    first_event: int = 0
    engine_events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Everything a reader must know before the first event.

    `run_id` is the same for all processes of one server, empty if they do not know of one another. `role` is "prefill" or
    "decode" if the two are engines of their own. `slot_history` "complete" promises that every alloc, free, evict, hand-over
    to the prefix cache and request status is recorded. `sweep_interval`: the prefix cache is walked every so many forwards
    of the first runner, 0 never. `tokens` is "hashed" if salted hashes stand in place of token ids; `salt_id` is the same
    for all traces hashed with one salt. `segment` is None for a trace of one file. `not_watched`: of what no verdict speaks.
    """

    format_major: int = schema.FORMAT_MAJOR
    format_minor: int = schema.FORMAT_MINOR
    recorder_version: Text = ""
    trace_id: Text = ""
    run_id: Text = ""
    created_ns: int = 0
    clock: Text = "time_ns counts nanoseconds since the Unix epoch, monotonic within a trace"
    engine: EngineInfo = field(default_factory=EngineInfo)
    model: ModelInfo = field(default_factory=ModelInfo)
    groups: tuple[PoolGroup, ...]
    tables: tuple[StateTable, ...]
    lut_lens: tuple[int, ...] = ()
    truth_table: StateTable | None = None
    runners: tuple[Runner, ...] = (Runner(),)
    ranks: Ranks = field(default_factory=Ranks)
    oracle: Oracle | None = None
    role: Text = ""
    slot_history: Text = ""
    sweep_interval: int = 0
    tokens: Text = "plain"
    salt_id: Text = ""
    capture: CaptureInfo = field(default_factory=CaptureInfo)
    segment: Segment | None = None
    not_watched: tuple[NotWatched, ...] = ()
    notes: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` on anything a replay could not stand on."""
        _check_header(self)

    def to_json(self) -> str:
        """Return the header as JSON text."""
        return json_text(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "TraceHeader":
        """Parse a header; raise `UnreadableTraceError` naming what is wrong with it.

        Fields that this build does not know are passed over (they come from a newer minor version); a newer major
        version is refused.
        """
        most = schema.MAX_HEADER_BYTES
        if len(text) > most:
            raise UnreadableTraceError(f"the trace header has {len(text):,} bytes, expected at most {most:,}")
        try:
            raw = whole_text(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise UnreadableTraceError(f"the trace header is not JSON ({error}); the file is damaged") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("format_major"), int):
            raise UnreadableTraceError("the trace header has no format version; the file is damaged or foreign")
        if raw["format_major"] > schema.FORMAT_MAJOR:
            raise UnreadableTraceError(
                f"the trace has format {raw['format_major']}.{raw.get('format_minor', 0)}, this build reads up to "
                f"{schema.FORMAT_MAJOR}.x; install a newer kvcanary"
            )
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise UnreadableTraceError(f"the trace header cannot be used: {error}") from None

    @property
    def first_event(self) -> int:
        """The number of the file's first event."""
        return 0 if self.segment is None else self.segment.first_event

    def streams(self, runner: int) -> list[tuple[int, KvStream]]:
        """Return `(group index, stream)` of a runner in the order in which `kv_bytes` holds them."""
        return [(g, s) for g, group in enumerate(self.groups) if group.runner == runner for s in group.streams]


def completed_header(header: TraceHeader, *, flush_bytes: int, flush_interval_ns: int, compression: str) -> TraceHeader:
    """Return the header with what only a writer knows."""
    from ... import __version__

    capture = dataclasses.replace(
        header.capture, flush_bytes=flush_bytes, flush_interval_ns=flush_interval_ns, compression=compression
    )
    return dataclasses.replace(
        header,
        capture=capture,
        recorder_version=header.recorder_version or __version__,
        trace_id=header.trace_id or uuid.uuid4().hex,
        created_ns=header.created_ns or time.time_ns(),
    )


def _expect(fits: bool, otherwise: str) -> None:
    if not fits:
        raise ValueError(otherwise)


def _check_header(header: TraceHeader) -> None:
    for name, allowed in (("role", schema.ROLES), ("slot_history", schema.SLOT_HISTORIES), ("tokens", schema.TOKENS)):
        given = getattr(header, name)
        _expect(given in allowed, f"{name} is {given!r}, expected one of {', '.join(map(repr, allowed))}")
    if (segment := header.segment) is not None:
        fits = segment.number >= 0 and segment.first_event >= 0
        _expect(fits, f"segment {segment.number} begins with event {segment.first_event}")
    sweep = header.sweep_interval
    _expect(sweep >= 0, f"sweep_interval is {sweep}, expected 0 (never) or a number of forwards")
    for number, table in enumerate([*header.tables, *([header.truth_table] if header.truth_table else [])]):
        fits = table.rows > 0 and table.width > 0 and table.rows * table.width <= schema.MAX_TABLE_CELLS
        _expect(fits, f"table {number} ({table.name}) has shape [{table.rows}, {table.width}]")
    for length in header.lut_lens:
        _expect(0 < length <= schema.MAX_SLOTS, f"a full-to-SWA table has length {length}")
    for what, count, most in (
        ("groups", len(header.groups), schema.MAX_PARTS),
        ("tables", len(header.tables), schema.MAX_PARTS),
        ("full-to-SWA tables", len(header.lut_lens), schema.MAX_PARTS),
        ("runners", len(header.runners), schema.MAX_PARTS),
        ("entries of not_watched", len(header.not_watched), schema.MAX_NOT_WATCHED),
    ):
        _expect(count <= most, f"{count} {what}, expected at most {most}")
    _expect(bool(header.runners), "no runner")
    for runner in header.runners:
        where, offset = f"runner {runner.name}", runner.token_offset
        _expect(offset in (0, 1), f"{where}: token_offset {offset}, expected 0 or 1 (EAGLE draft)")
        known = set(runner.derived) <= set(schema.INT_LISTS)
        _expect(known, f"{where}: derived {runner.derived}, expected names of list columns")
    for entry in header.not_watched:
        known = entry.what in schema.NOT_WATCHED
        _expect(known, f"not_watched says {entry.what!r}, expected one of {', '.join(schema.NOT_WATCHED)}")
    for number, group in enumerate(header.groups):
        _check_group(header, group, f"group {number} ({group.name})")


def _check_group(header: TraceHeader, group: PoolGroup, where: str) -> None:
    _expect(group.kind in ("full", "swa"), f"{where}: kind is {group.kind!r}, expected 'full' or 'swa'")
    fits = (group.window > 0) == (group.kind == "swa") and 0 <= group.window <= schema.MAX_SLOTS
    _expect(fits, f"{where}: window {group.window} does not fit kind {group.kind!r}")
    for what, index, count, least in (
        ("runner", group.runner, len(header.runners), 0),
        ("table", group.table, len(header.tables), 0),
        ("full-to-SWA table", group.lut, len(header.lut_lens), -1),
    ):
        _expect(least <= index < count, f"{where}: {what} {index} of {count}")
    fits = 0 < group.num_slots <= schema.MAX_SLOTS and 0 <= group.host_num_slots <= schema.MAX_SLOTS
    _expect(fits, f"{where}: {group.num_slots} slots, {group.host_num_slots} host slots")
    _expect(group.slot_shift in (0, 1), f"{where}: slot_shift is {group.slot_shift}, expected 0 or 1")
    fits = group.page_size >= 1 and group.num_layers >= 0
    _expect(fits, f"{where}: page_size {group.page_size}, {group.num_layers} layers")
    padding = group.padding_slots
    fits = len(padding) <= schema.MAX_PADDING_SLOTS and all(0 <= slot < group.num_slots for slot in padding)
    what = f"expected at most {schema.MAX_PADDING_SLOTS} of its own slots"
    _expect(fits, f"{where}: padding_slots {padding[:8]}, {what}")
    fits = bool(group.halves) and set(group.halves) <= {"K", "V"} and len(set(group.halves)) == len(group.halves)
    _expect(fits, f"{where}: halves {group.halves}, expected K or K and V")
    for half in group.halves:
        fits = sum(stream.half == half for stream in group.streams) <= schema.MAX_KV_SOURCES
        _expect(fits, f"{where}: more than {schema.MAX_KV_SOURCES} KV sources for half {half}")
    for stream in group.streams:
        own = stream.half in group.halves
        _expect(own, f"{where}: a KV source for half {stream.half!r}, halves are {group.halves}")
        captured, of = stream.capture_bytes, stream.bytes_per_token
        fits = 0 < captured <= of <= schema.MAX_TOKEN_BYTES and not captured % 16
        _expect(fits, f"{where}: captures {captured} of {of} bytes a token, expected a positive multiple of 16")
