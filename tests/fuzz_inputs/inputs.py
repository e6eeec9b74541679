"""What the targets start from: small traces, tails, reports and workloads, made anew from today's format."""

import os
import random
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from crc32c import crc32c
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.checksum import batch_crc32c, column_forms, text_crc32c
from kvcanary.recorder.trace.decode import ARROW_ERRORS
from kvcanary.recorder.trace.event import TraceEvent, batch_metadata, encode_events, header_schema
from kvcanary.recorder.trace.framing import FIRST_MESSAGE, RECORD_BATCH, find_frames
from kvcanary.recorder.trace.header import TraceHeader
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.trace.schema import (
    BYTE_LISTS,
    CRC_KEY,
    EVENT_KINDS,
    HEADER_CRC_KEY,
    HEADER_KEY,
    INT_LISTS,
    SCALARS,
)
from kvcanary.recorder.trace.tail_reader import HEADER_BYTES, NUMBERS, RECORD, RECORD_MAGIC
from kvcanary.recorder.trace.trace_bytes import TraceBytes

from ..support.engines.toy_engine import Shape, ToyEngine
from ..support.places import DATA
from ..support.raw_traces import told

CORPUS = Path(__file__).parent / "corpus"
SEED_BYTES = 1 << 16
# Numbers at which something ends: types, pools, tables, "unknown", and their neighbours.
NUMBERS_OF_INTEREST = (
    *(0, 1, 2, 3, 7, 8, 63, 64, 259, 260, 261, 4096, 4097, 65535, 65536, -1, -2, -3),
    *((1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 31), -(1 << 62), -(1 << 63)),
)
INT_NAMES, BYTE_NAMES = sorted(INT_LISTS), sorted(BYTE_LISTS)
TEXT_NAMES = sorted(name for name, (_, default) in SCALARS.items() if isinstance(default, str) and name != "kind")
NUMBER_NAMES = sorted(set(SCALARS) - {*TEXT_NAMES, "kind", "event", "time_ns"})
KINDS = sorted(EVENT_KINDS)


@dataclass(frozen=True)
class Base:
    """A trace's header and events, to be changed."""

    header: TraceHeader
    events: tuple[TraceEvent, ...]


def seeds(target: str) -> list[bytes]:
    """Return what is kept for a target in `corpus/`."""
    folder = CORPUS / target
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def write_trace(path: Path, header: TraceHeader, events: list[TraceEvent], *, batches: int = 2) -> None:
    """Write a closed trace without the writer's thread; its CRCs have ten digits, so that they can be made anew."""
    notes = list(header.notes)
    while text_crc32c(header.to_json().encode("ascii")) < 10**9:
        notes = [*notes, "x"]
        header = replace(header, notes=tuple(notes))
    schema = header_schema(header)
    first = header.first_event
    size = max(1, -(-len(events) // batches))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, len(events), size):
            batch = encode_events(events[start : start + size], first + start, schema)
            metadata = batch_metadata(batch, first + start)
            metadata[CRC_KEY] = metadata[CRC_KEY].rjust(10, b"0")
            writer.write_batch(batch, custom_metadata=metadata)


class _Held(TraceBytes):
    """A file that is in memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__(-1)
        self._data = memoryview(data)

    def read_some(self, start: int, end: int) -> memoryview:
        return self._data[start:end]


def with_right_crcs(data: bytes) -> bytes:
    """Return a trace with the CRCs that its present bytes have, where these can be had."""
    made = bytearray(data)
    view = memoryview(data)
    schema = forms = None
    for frame in find_frames(_Held(data), FIRST_MESSAGE, len(data)):
        message = view[frame.start : frame.end]
        try:
            if schema is None:
                schema = pa.ipc.read_schema(pa.py_buffer(message))
                forms = column_forms(schema)
                metadata = schema.metadata or {}
                _put(made, 0, len(made), metadata.get(HEADER_CRC_KEY, b""), text_crc32c(metadata.get(HEADER_KEY, b"")))
            elif frame.kind == RECORD_BATCH and len(frame.metadata.get(CRC_KEY, b"")) == 10:
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(message)), schema)
                batch.validate(full=True)
                first = int(batch.column("event")[0].as_py())
                _put(made, frame.start, frame.body_start, frame.metadata[CRC_KEY], batch_crc32c(batch, first, forms))
        except (*ARROW_ERRORS, AttributeError, struct.error, IndexError):
            continue
    return bytes(made)


def _put(made: bytearray, start: int, stop: int, old: bytes, crc: int) -> None:
    new = b"%010d" % crc
    if len(old) == len(new):
        made[start:stop] = bytes(made[start:stop]).replace(old, new)


def with_right_tail_crcs(data: bytes) -> bytes:
    """Return a tail file whose records have the CRCs that their present bytes have."""
    made, at = bytearray(data), HEADER_BYTES
    while at + RECORD.size <= len(made):
        magic, _, number, size = RECORD.unpack_from(made, at)
        body = bytes(made[at + RECORD.size : at + RECORD.size + size])
        if magic != RECORD_MAGIC or len(body) != size:
            break
        RECORD.pack_into(made, at, magic, crc32c(body, crc32c(NUMBERS.pack(number, size))), number, size)
        at += RECORD.size + size
    return bytes(made)


def bases(folder: Path) -> list[Base]:
    """Return traces of each kind: full, sliding, a segment with a keyframe, of real and of simulated engines."""
    found = []
    for shape in (Shape(), Shape(window=12), Shape(halves=("K",), sources=2)):
        engine = ToyEngine(shape, seed=2, forwards=10, fault="early_free")
        found.append(Base(engine.header, tuple(engine.events)))
    config = EngineConfig(page_size=4, num_pages=40, chunk_tokens=32, sweep_interval=6)
    workload = RandomWorkload(requests=6, prompt_tokens=20, output_tokens=8, max_tokens=40, arrival_rate=400.0)
    with SimulatedEngine(config, workload, folder / "base.arrow", segment_bytes=1 << 14) as simulated:
        simulated.run()
    recorded = sorted(folder.glob("base.*.arrow"))[1:3]
    recorded += [DATA / "clean_hybrid.arrow", DATA / "simulated" / "clean_eagle.arrow"]
    recorded += [DATA / "simulated" / "clean_pd" / "decode.arrow", DATA / "simulated" / "clean_swa.arrow"]
    for path in recorded:
        with TraceReader(path) as reader:
            events = [told(view) for batch in reader.stream() if hasattr(batch, "num_events") for view in batch]
            found.append(Base(reader.header, tuple(events[:60])))
    return found


EDIT = struct.Struct("<HBBiq")  # event, what, column, index, value
_TEXTS = (
    *("", "begin", "part", "request", "forward", "end", "cut", "slots_listed", "decode", "extend", "idle", "mixed"),
    *("\x1b[2J", "x" * 5000, "\udcff", "0.records", "0.table", "0.ledger", "[]", '{"a":1}', "write", "pre", "tail"),
)


def edited(base: Base, program: bytes) -> list[TraceEvent]:
    """Return the events of a trace after the edits that a program's bytes stand for."""
    events = list(base.events)
    for at in range(0, min(len(program), 64 * EDIT.size) - EDIT.size + 1, EDIT.size):
        number, what, column, index, value = EDIT.unpack_from(program, at)
        if not events:
            break
        number %= len(events)
        events[number : number + 1] = _edit(events[number], what % 12, column, index, value, events)
    return events


def _edit(
    event: TraceEvent, what: int, column: int, index: int, value: int, events: list[TraceEvent]
) -> list[TraceEvent]:
    scalars, ints, lists = dict(event.scalars), dict(event.ints), dict(event.bytes)
    kind = event.kind
    present = sorted(ints)
    name = present[column % len(present)] if present and what < 6 else INT_NAMES[column % len(INT_NAMES)]
    values = ints.get(name, np.zeros(0, np.int64))
    if what in (0, 1) and len(values):
        ints[name] = values.copy()
        ints[name][index % len(values)] = value
    elif what in (2, 6):
        ints[name] = np.append(values, [value] * (1 + abs(index) % 4)).astype(np.int64)
    elif what == 3:
        ints[name] = values[: len(values) // 2]
    elif what == 4 and len(values):
        ints[name] = values + (value if -9 < value < 9 else 1)
    elif what == 7:
        scalars[NUMBER_NAMES[column % len(NUMBER_NAMES)]] = value
    elif what == 8:
        scalars[TEXT_NAMES[column % len(TEXT_NAMES)]] = _TEXTS[index % len(_TEXTS)]
    elif what == 9:
        blob = BYTE_NAMES[column % len(BYTE_NAMES)]
        data = lists.get(blob, np.zeros(0, np.uint8))
        size = len(data) if value >= 0 else abs(value) % 4096
        lists[blob] = np.resize(data if len(data) else np.zeros(1, np.uint8), size).copy()
        if size:
            lists[blob][index % size] = value & 255
    elif what == 10:
        return [[], [event, event], [events[index % len(events)], event]][column % 3]
    elif what == 11:
        kind = KINDS[column % len(KINDS)]
    return [TraceEvent(kind=kind, time_ns=event.time_ns, scalars=scalars, ints=ints, bytes=lists)]


def random_program(rng: random.Random, size: int) -> bytes:
    """Return edits whose values are those of interest more often than not."""
    edits = b""
    for _ in range(size):
        value = rng.choice(NUMBERS_OF_INTEREST) if rng.random() < 0.7 else rng.randrange(-300, 300)
        edits += EDIT.pack(
            rng.randrange(1 << 16), rng.randrange(256), rng.randrange(256), rng.randrange(1 << 20), value
        )
    return edits


_DIGITS = re.compile(rb"-?\d+")


def bent(data: bytes, rng: random.Random, most: int = SEED_BYTES) -> bytes:
    """Return bytes changed as damage and malice do: bits, numbers, pieces cut out, doubled or moved."""
    made = bytearray(data) or bytearray(os.urandom(8))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        size = len(made)
        at = rng.randrange(size + 1)
        piece = made[at : at + rng.choice((1, 2, 4, 8, 64, 1024))]
        what = rng.choices(
            ("bit", "int64", "int32", "less", "double", "move", "cut", "number"), (6, 4, 4, 2, 2, 2, 1, 4)
        )
        number = rng.choice(NUMBERS_OF_INTEREST) & (1 << 64) - 1
        match what[0]:
            case "bit":
                made[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in piece[:1])
            case "int64":
                made[at : at + 8] = struct.pack("<Q", number)
            case "int32":
                made[at : at + 4] = struct.pack("<I", number & 0xFFFFFFFF)
            case "less":
                del made[at : at + len(piece)]
            case "double":
                made[at:at] = piece
            case "move":
                begin = rng.randrange(size + 1)
                made[at : at + len(piece)] = made[begin : begin + len(piece)]
            case "cut":
                del made[at:]
            case "number":
                _bend_number(made, rng)
    return bytes(made[:most])


def _bend_number(made: bytearray, rng: random.Random) -> None:
    found = list(_DIGITS.finditer(made))
    if found:
        one = rng.choice(found)
        new = rng.choice((*map(str, NUMBERS_OF_INTEREST), "1e999", "null", "NaN", '"x"', "[]", "{}", "9" * 400, "true"))
        made[one.start() : one.end()] = new.encode()
