"""The background thread's part: a frame is copied to the host and read, section by section."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ....kernels.arrays import BoolArray, ByteArray, Int64Array
from ....kernels.capture.changes import cells_to_runs
from ....kernels.capture.frames import (
    ATTENTION,
    DONE,
    KV_CHANGES,
    KV_ENTRY,
    LUT_CHANGES,
    STATE_VALUES,
    TABLE_CHANGES,
    TABLE_ENTRY,
    TABLE_OF_ENTRY,
    UNCHANGED,
    VALUES,
)
from ....kernels.capture.layers import VALUE_KINDS
from ...trace.schema import ATTENTION_LENS, ATTENTION_SLOTS, PHASE_AFTER
from ..forward_event import attention_columns
from ..forward_input import CopiedForward, KvChange
from .capture import DeviceCapture
from .forward import FrameInFlight

ASK_AGAIN_S: Final = 0.001
MOST_WORDS: Final = 1 << 18  # that are copied at once, of several frames
_NOTHING: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame on the host, in arrays of its own; padding at the end is left out."""

    forward: CopiedForward  # but for request ids, tables and tokens
    slots: Int64Array  # [tables of the runner, tokens] where each token is written
    written: list[ByteArray]  # of each stream [tokens, capture_bytes]
    table_changes: list[Int64Array]  # of each table of the runner [n, 3] row, position, slot
    lut_changes: Int64Array  # [n, 3] table, full slot, sliding-window slot
    complete: bool  # all changes of tables are there
    all_luts: bool  # those of full-to-SWA tables are
    carried: list[Int64Array]  # what `FrameInFlight.carried` has
    # Of each stream that is searched, by its number among the runner's, whether rows have values that no model writes,
    # `[tokens, VALUE_KINDS, layers]`; nothing if none does.
    values: dict[int, BoolArray]


class Fetched(NamedTuple):
    """A frame's counters and what every frame has, in arrays of its own."""

    frame: FrameInFlight
    counters: list[int]
    fixed: Int64Array


class FrameReader:
    """Copies frames to the host by a stream of its own, into pinned memory that is used again; for one thread."""

    def __init__(self, capture: DeviceCapture) -> None:
        self._capture = capture
        self._stream: Any = None
        self._pinned: Any = None
        self._counters: Any = None
        self._here: Any = None  # the same memory as numpy has it

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory in use."""
        return 0 if self._pinned is None else int(self._pinned.shape[0]) * 8

    def use_device(self) -> None:
        """Take the engine's device for this thread's: it would be the first one, and get a context there for nothing."""
        if self._capture.on_gpu:
            import torch

            torch.cuda.set_device(self._capture.frames.device)

    def fetch(self, frames: Sequence[FrameInFlight]) -> list[Fetched]:
        """Wait until the first of some frames, in order, is complete; return it and those behind it that are complete as well.

        There is one wait for all, since that takes as long as all the rest.
        """
        ends = np.cumsum([frame.layout.fixed for frame in frames]).tolist()
        most = max(sum([end <= MOST_WORDS for end in ends]), 1)
        frames, ends = frames[:most], ends[:most]
        rows = [frame.counters for frame in frames]
        if not self._capture.on_gpu:
            there, content = self._capture.counters.numpy(), self._capture.frames.numpy()
            fixed = np.concatenate([content[frame.at : frame.at + frame.layout.fixed] for frame in frames])
            return self._divided(frames, there[rows].tolist(), fixed, ends)
        self._prepare(ends[-1])
        while True:
            self._counters.copy_(self._capture.counters, non_blocking=True)
            for frame, end in zip(frames, ends, strict=True):
                words = frame.layout.fixed
                there = self._capture.frames[frame.at : frame.at + words]
                self._pinned[end - words : end].copy_(there, non_blocking=True)
            self._stream.synchronize()
            counters = self._counters.numpy()[rows].tolist()
            ready = [found[DONE] >= frame.programs for frame, found in zip(frames, counters, strict=True)]
            complete = ready.index(False) if False in ready else most
            if complete:
                frames, ends = frames[:complete], ends[:complete]
                return self._divided(frames, counters, self._here[: ends[-1]].copy(), ends)
            time.sleep(ASK_AGAIN_S)

    @staticmethod
    def _divided(
        frames: Sequence[FrameInFlight], counters: list[list[int]], fixed: Int64Array, ends: list[int]
    ) -> list[Fetched]:
        each = zip(frames, counters, ends, strict=False)
        return [Fetched(frame, found, fixed[end - frame.layout.fixed : end]) for frame, found, end in each]

    def read(self, fetched: Fetched, time_ns: int) -> Frame:
        """Return a complete frame."""
        in_flight, counters, fixed = fetched
        layout = in_flight.layout
        bs, tokens = layout.bs, layout.tokens
        requests = fixed[: 3 * bs].reshape(3, bs)
        inputs = fixed[3 * bs : layout.inputs].reshape(2 + layout.tables, tokens)
        lens = fixed[layout.lens_at : layout.states_at].reshape(2, bs)
        states = fixed[layout.states_at : layout.carried_at].reshape(layout.states, STATE_VALUES, bs)
        real, real_tokens = _without_padding(in_flight, requests[0])
        written, at = [], layout.inputs
        for words in layout.stream_words:
            content = fixed[at : at + real_tokens * words]
            written.append(content.view(np.uint8).reshape(real_tokens, words * 8))
            at += tokens * words
        tables, all_tables = self._section(in_flight, counters, TABLE_CHANGES)
        luts, all_luts = self._section(in_flight, counters, LUT_CHANGES)
        changed, all_changed = self._section(in_flight, counters, KV_CHANGES)
        slots, all_slots = self._section(in_flight, counters, ATTENTION)
        notes = [in_flight.note] if in_flight.note else []
        if not all_changed:
            notes.append(f"{counters[KV_CHANGES]:,} slots changed; some are recorded with a later forward")
        if not all_slots:
            notes.append(f"attention got {counters[ATTENTION]:,} slots other than it should; they are not recorded")
        attention = in_flight.attention if all_slots else in_flight.attention & ATTENTION_LENS
        rows, prefix_lens, extend_lens = requests[:, :real]
        input_ids, positions = inputs[:2, :real_tokens]
        forward = CopiedForward(
            mode=in_flight.mode,
            runner=in_flight.runner,
            number=in_flight.number,
            time_ns=time_ns,
            rows=rows,
            request_ids=np.full(real, -1, np.int64),
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            input_ids=input_ids,
            positions=positions,
            kv_watched=in_flight.watched,
            kv_changes=_kv_changes(changed, layout.stream_words),
            attention_watched=attention,
            states=tuple(states[:, :, :real]),
            note="; ".join(notes),
            failed=bool(in_flight.note),
        )
        if attention & ATTENTION_LENS:
            forward.attention["attention_seq_lens"], forward.attention["attention_query_lens"] = lens[:, :real]
        if attention & ATTENTION_SLOTS and len(slots):
            groups = np.array(
                [group.number for group in self._capture.shadows.runners[in_flight.runner].groups], np.int64
            )
            forward.attention |= _attention_slots(groups, slots)
        return Frame(
            forward=forward,
            slots=inputs[2:, :real_tokens],
            written=written,
            table_changes=_cells(tables, layout.tables),
            lut_changes=luts,
            complete=all_tables and all_luts,
            all_luts=all_luts,
            carried=_carried(in_flight, fixed),
            values=self._values(in_flight, real_tokens) if counters[VALUES] else {},
        )

    def _section(self, in_flight: FrameInFlight, counters: list[int], sort: int) -> tuple[Int64Array, bool]:
        """Return the entries of one sort of changes, `[n, entry]`, and whether they are all."""
        section = in_flight.layout.sections[sort]
        kept = min(counters[sort], section.capacity)
        content = self._fetch(in_flight.at + section.at, kept * section.entry).copy() if kept else _NOTHING
        return content.reshape(kept, section.entry), kept == counters[sort]

    def _values(self, in_flight: FrameInFlight, real_tokens: int) -> dict[int, BoolArray]:
        layout, found, at = in_flight.layout, {}, 0
        words = self._fetch(in_flight.at + layout.values_at, layout.values).copy()
        for number, stream in enumerate(self._capture.shadows.runners[in_flight.runner].streams):
            if stream.layers is None or not stream.layers.lanes:
                continue
            each = stream.layers.value_words // VALUE_KINDS
            mine = words[at : at + layout.tokens * VALUE_KINDS * each].reshape(layout.tokens, VALUE_KINDS, each)
            bits = np.unpackbits(mine[:real_tokens].view(np.uint8), axis=2, bitorder="little").astype(np.bool_)
            found[number] = bits[:, :, : int(stream.layers.begins.numel())]
            at += mine.size
        return found

    def _fetch(self, at: int, words: int) -> Int64Array:
        """Return a stretch of the frames, valid until the next call."""
        if not self._capture.on_gpu:
            there: Int64Array = self._capture.frames[at : at + words].numpy()
            return there
        self._prepare(words)
        self._pinned[:words].copy_(self._capture.frames[at : at + words], non_blocking=True)
        self._stream.synchronize()
        here: Int64Array = self._here[:words]
        return here

    def _prepare(self, words: int) -> None:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(device=self._capture.frames.device)
            torch.cuda.set_stream(self._stream)  # this thread's: to name it for each copy takes longer than the copy
            self._counters = torch.zeros(self._capture.counters.shape, dtype=torch.int64, pin_memory=True)
        if self._pinned is None or int(self._pinned.shape[0]) < words:
            size = 1 << max(words - 1, 1 << 16).bit_length()
            self._pinned = torch.zeros(size, dtype=torch.int64, pin_memory=True)
            self._here = self._pinned.numpy()


def _without_padding(in_flight: FrameInFlight, rows: Int64Array) -> tuple[int, int]:
    """Return how many requests and tokens of a frame count: those that the engine runs, and all that are no padding.

    A graph runs as many requests as it was captured with, with as many tokens each.
    """
    bs, tokens = in_flight.layout.bs, in_flight.layout.tokens
    if not 0 <= in_flight.bs < bs:
        return bs, tokens
    real = max(in_flight.bs, int(np.flatnonzero(rows).max(initial=-1)) + 1)
    return real, tokens // bs * real


def _carried(in_flight: FrameInFlight, fixed: Int64Array) -> list[Int64Array]:
    if not in_flight.carried:
        return []
    counts = [count for _, count in in_flight.carried]
    places = np.cumsum([in_flight.layout.carried_at, *counts])
    return [fixed[at : at + count] for at, count in zip(places.tolist(), counts, strict=False)]


def _cells(tiles: Int64Array, tables: int) -> list[Int64Array]:
    """Return the changed cells of tiles by their tables, `[n, 3]` each: row, position, slot."""
    if not len(tiles):  # of most forwards
        return [np.empty((0, 3), np.int64)] * tables
    which, offset = np.nonzero(tiles[:, TABLE_ENTRY:] != UNCHANGED)
    found = np.empty((which.size, 3), np.int64)
    found[:, 0] = tiles[which, 0] % TABLE_OF_ENTRY
    found[:, 1] = tiles[which, 1] + offset
    found[:, 2] = tiles[which, TABLE_ENTRY + offset]
    if tables == 1:
        return [found]
    table = tiles[which, 0] // TABLE_OF_ENTRY
    return [found[table == number] for number in range(tables)]


def _attention_slots(groups: Int64Array, found: Int64Array) -> dict[str, Int64Array]:
    """Return as columns what attention got, `[n, 4]` group of the runner, request, position, slot, in any order."""
    group, request, position, slot = found[np.lexsort((found[:, 2], found[:, 1], found[:, 0]))].T
    runs = cells_to_runs(group << 32 | request, position, slot.copy())
    return attention_columns(groups[runs.rows >> 32], runs._replace(rows=runs.rows & 0xFFFFFFFF))


def _kv_changes(entries: Int64Array, stream_words: tuple[int, ...]) -> list[KvChange]:
    """Return what changed without a write, each slot of a stream once, ascending."""
    found = []
    for stream, words in enumerate(stream_words if len(entries) else ()):
        mine = entries[entries[:, 0] == stream]
        if len(mine):
            slots, first = np.unique(mine[:, 1], return_index=True)
            content = np.ascontiguousarray(mine[first, KV_ENTRY : KV_ENTRY + words]).view(np.uint8)
            content = content.reshape(len(slots), words * 8)
            found.append(KvChange(stream=stream, phase=PHASE_AFTER, slots=slots, content=content))
    return found
