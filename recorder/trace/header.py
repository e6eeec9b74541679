"""The header that makes a trace explain itself: engine, model, pools, tables, runners, ranks, capture settings.

It travels as JSON under `kvcanary.header` in the Arrow schema's metadata. `check_fields` holds dataclasses to their annotations:
what a value may be stands where the field does.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ..errors import UnreadableTraceError, json_text, whole_text
from . import schema

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Chance = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=schema.MAX_TEXT_CHARS)]
Slots = Annotated[int, Meta(ge=1, le=schema.MAX_SLOTS)]
_PARTS = Meta(max_length=schema.MAX_PARTS)
SAMPLE_BYTES: Final = 16  # that a sampling stream holds of each slot


def check_fields(given: Any) -> None:
    """Raise `ValueError` for a field with another value than its annotation, of a range or of choices, allows."""
    owner: Any = type(given)
    for name, kind in _limited(owner):
        value = getattr(given, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            said = str(error).partition(" - at")[0]
            expected = said.removeprefix("Expected ") if said.startswith("Expected ") else f"another value: {said}"
            if get_origin(kind) is Literal:
                expected = f"one of {', '.join(word or repr(word) for word in get_args(kind))}"
            raise ValueError(f"{name} is {value!r}, expected {expected}") from None


def expect(fits: bool, otherwise: str) -> None:
    """Raise `ValueError` unless it fits."""
    if not fits:
        raise ValueError(otherwise)


@functools.cache
def _limited(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hint) for name, hint in hints.items() if get_origin(hint) in (Annotated, Literal, tuple)]


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

    With a `seed` other than -1 the stream samples 16 bytes of one of `layers` of each slot, in which a token has `bytes_per_token`
    (`kernels.capture.layers.watched_bytes`). The canary's hash leaves it out. `dtype` is what the bytes are, empty if nobody says;
    every row of sampled floats is searched for values that no model writes. `scale` multiplies 8-bit values of the first or all sampled layers.
    """

    half: Text
    layer: int = 0
    layers: tuple[int, ...] = ()
    bytes_per_token: Annotated[int, Meta(le=schema.MAX_TOKEN_BYTES)]
    capture_bytes: Annotated[int, Meta(ge=16, multiple_of=16)]
    origin: Text = "stored"
    seed: Annotated[int, Meta(ge=-1, lt=1 << 32)] = -1
    dtype: Text = ""
    scale: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        captured, of = self.capture_bytes, self.bytes_per_token
        expect(captured <= of, f"capture_bytes is {captured}, expected at most bytes_per_token, {of}")
        fits = not self.samples or (bool(self.layers) and captured == SAMPLE_BYTES)
        said = f"a stream with a seed has layers {self.layers} and {captured} capture_bytes, expected 16 of some"
        expect(fits, said)

    @property
    def samples(self) -> bool:
        """Whether it holds some bytes of one layer of each slot, and not the same of all."""
        return self.seed >= 0

    @property
    def num_chunks(self) -> int:
        """How many pieces a token has in a layer of which a sampling stream holds one."""
        return self.bytes_per_token // SAMPLE_BYTES

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
    window: Annotated[int, Meta(ge=0, le=schema.MAX_SLOTS)] = 0
    runner: Count = 0
    table: Count = 0
    lut: Annotated[int, Meta(ge=-1)] = -1
    num_slots: Slots
    page_size: Positive = 1
    halves: tuple[Text, ...] = ("K", "V")
    streams: tuple[KvStream, ...] = ()
    reads_before_write: bool = False
    host_num_slots: Annotated[int, Meta(ge=0, le=schema.MAX_SLOTS)] = 0
    padding_slots: Annotated[tuple[Count, ...], Meta(max_length=schema.MAX_PADDING_SLOTS)] = (0,)
    slot_shift: Annotated[int, Meta(ge=0, le=1)] = 0
    num_layers: Count = 0

    def __post_init__(self) -> None:
        check_fields(self)
        fits = self.kind in ("full", "swa") and (self.window > 0) == (self.kind == "swa")
        expect(fits, f"kind is {self.kind!r} and window {self.window}, expected 'full' and 0, or 'swa' and a window")
        highest = max(self.padding_slots, default=0)
        expect(highest < self.num_slots, f"padding_slots has {highest}, expected some of the {self.num_slots} slots")
        expect(
            self.halves in (("K",), ("V",), ("K", "V"), ("V", "K")), f"halves are {self.halves}, expected K or K and V"
        )
        sources = [stream.half for stream in self.streams]
        fits = set(sources) <= set(self.halves)
        expect(fits, f"streams are of the halves {sorted(set(sources))}, expected those of {self.halves}")
        most = max(map(sources.count, self.halves))
        expect(most <= schema.MAX_KV_SOURCES, f"{most} streams of one half, expected at most {schema.MAX_KV_SOURCES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """The shape of one req_to_token table: `[rows, width] int32`."""

    name: Text = "req_to_token"
    rows: Positive
    width: Positive

    def __post_init__(self) -> None:
        check_fields(self)
        fits, most = self.rows * self.width <= schema.MAX_TABLE_CELLS, f"{schema.MAX_TABLE_CELLS:,}"
        expect(fits, f"{self.name} has shape [{self.rows}, {self.width}], expected at most {most} cells")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """A pool of recurrent state (Mamba, linear attention, short convolutions): a slot is all of a request, or a checkpoint.

    The first `hashed_bytes` of each of a slot's parts in layer `layer` are hashed, the last if `from_end`; `num_layers` layers lie
    in the pool. What `padding_slots` hold is nobody's: a request that goes on from there has no state. `zeros`: the hash of a slot
    of zeros, 0 if it is not known. `part_bytes`: how many bytes each part has, none if nobody says.
    """

    name: Text
    runner: Count = 0
    num_slots: Slots
    padding_slots: Annotated[tuple[Count, ...], Meta(max_length=schema.MAX_PADDING_SLOTS)] = ()
    layer: Count = 0
    num_layers: Count = 0
    hashed_bytes: Count = 0
    from_end: bool = False
    zeros: int = 0
    part_bytes: Annotated[tuple[Count, ...], _PARTS] = ()

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A model runner; an EAGLE draft reads truth tokens at `token_offset` 1. `derived` names the columns of its
    forwards that the recorder worked out: replayed, and judged by nothing.
    """

    name: Text = "target"
    token_offset: Annotated[int, Meta(ge=0, le=1)] = 0
    derived: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        known = set(self.derived) <= set(schema.INT_LISTS)
        expect(known, f"derived {self.derived}, expected names of list columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotWatched:
    """Something that this recording does not look at: `what` is one of `NOT_WATCHED`, `name` the engine's word for it."""

    what: Text
    name: Text
    reason: Text = ""

    def __post_init__(self) -> None:
        known = ", ".join(schema.NOT_WATCHED)
        expect(self.what in schema.NOT_WATCHED, f"not_watched says {self.what!r}, expected one of {known}")


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
class Sampler:
    """What gave every sampled token of the target, of `vocab_size`: the hash oracle ("hash"), or one's own (module:name)."""

    name: Text = "hash"
    vocab_size: Annotated[int, Meta(ge=1, lt=schema.MAX_SLOTS)]

    def __post_init__(self) -> None:
        check_fields(self)


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
    """One of the files that a recording was cut into, all with one `trace_id`; `number` counts from 0. `first_event` is
    the number of the file's first event, `engine_events` how many of the engine's the files before hold.
    """

    number: Count
    first_event: Count = 0
    engine_events: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What a trace is the smallest part of: a recording of so many events, and one incident of it."""

    events: Count = 0
    forwards: Count = 0
    requests: Count = 0
    incident: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which part of a fleet's servers and time is recorded, of which this recording is some.

    A hash chooses these shares; `window_seconds` is 0 if all time is recorded. "incident": it began since somebody froze.
    """

    fleet: Text = ""
    server: Text = ""
    servers: Chance = 1.0
    windows: Chance = 1.0
    window_seconds: Count = 0
    bytes_a_day: Count = 0
    reason: Literal["window", "incident"] = "window"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Everything a reader must know before the first event.

    `run_id` is the same for all processes of one server, empty if they do not know of one another. `role` is "prefill" or
    "decode" if the two are engines of their own. `slot_history` "complete" promises that every alloc, free, evict,
    hand-over to the prefix cache and request status is recorded, "allocator" what the allocators give out and take back alone.
    `sweep_interval`: the prefix cache is walked every so many forwards of the first runner, 0 never. `tokens` is "hashed"
    if salted hashes stand in place of token ids; `salt_id` is the same for all traces hashed with one salt. `sampler`:
    every token was foretold, `oracle` only that a decode's inputs are the hash's. `segment` is None for a trace of one
    file. `not_watched`: of what no verdict speaks. `shrunk`: not None for a part of a recording that `kvcanary shrink`
    made. `sampling`: None if all of the server's time is recorded.
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
    groups: Annotated[tuple[PoolGroup, ...], _PARTS]
    tables: Annotated[tuple[StateTable, ...], _PARTS]
    lut_lens: Annotated[tuple[Slots, ...], _PARTS] = ()
    states: Annotated[tuple[StatePool, ...], _PARTS] = ()
    truth_table: StateTable | None = None
    runners: Annotated[tuple[Runner, ...], Meta(min_length=1, max_length=schema.MAX_PARTS)] = (Runner(),)
    ranks: Ranks = field(default_factory=Ranks)
    oracle: Oracle | None = None
    sampler: Sampler | None = None
    role: Text = ""
    slot_history: Text = ""
    sweep_interval: Count = 0
    tokens: Text = "plain"
    salt_id: Text = ""
    capture: CaptureInfo = field(default_factory=CaptureInfo)
    segment: Segment | None = None
    not_watched: Annotated[tuple[NotWatched, ...], Meta(max_length=schema.MAX_NOT_WATCHED)] = ()
    notes: tuple[Text, ...] = ()
    shrunk: Shrunk | None = None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` on anything a replay could not stand on."""
        check_fields(self)
        allowed = {"role": schema.ROLES, "slot_history": schema.SLOT_HISTORIES, "tokens": schema.TOKENS}
        for name, values in allowed.items():
            given = getattr(self, name)
            expect(given in values, f"{name} is {given!r}, expected one of {', '.join(map(repr, values))}")
        counts = {"runner": len(self.runners), "table": len(self.tables), "lut": len(self.lut_lens)}
        for number, group in enumerate(self.groups):
            for name, count in counts.items():
                index = getattr(group, name)
                expect(index < count, f"group {number} ({group.name}): {name} is {index}, there are {count}")
        for number, pool in enumerate(self.states):
            fits = pool.runner < len(self.runners)
            expect(fits, f"state pool {number} ({pool.name}): runner is {pool.runner}, there are {len(self.runners)}")

    def to_json(self) -> str:
        """Return the header as JSON text."""
        return json_text(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "TraceHeader":
        """Parse a header; raise `UnreadableTraceError` naming what is wrong with it. Fields that this build does not
        know are passed over (they come from a newer minor version); a newer major version is refused.
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
