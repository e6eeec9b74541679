"""The background thread's part: a frame is copied to the host and read, section by section."""

import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import ByteArray, Int64Array
from ....kernels.capture.frames import (
    ATTENTION,
    ATTENTION_ENTRY,
    DONE,
    KV_CHANGES,
    KV_ENTRY,
    LUT_CHANGES,
    LUT_ENTRY,
    NUM_COUNTERS,
    TABLE_CHANGES,
    TABLE_ENTRY,
    UNCHANGED,
    FrameLayout,
)
from ...trace.schema import ATTENTION_LENS
from .capture import DeviceCapture
from .forward import FrameInFlight

ASK_AGAIN_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame on the host, in arrays of its own.

    `rows`, `prefix_lens`, `extend_lens` `[bs]`, `input_ids`, `positions`, `out_cache_loc` `[tokens]`, `written[stream]`
    `[tokens, capture_bytes] uint8`; `table_changes` `[n, 3]` row, position, slot; `lut_changes` `[n, 3]` table, full
    slot, sliding-window slot; `kv_changes` `[n]` entries of stream, slot and bytes. `complete`: all changes of tables
    are there, `all_luts`: those of full-to-SWA tables; `note` says what did not fit. `seq_lens`, `query_lens` `[bs]` are
    what attention got, `attention_slots` `[n, 4]` group, request, position and slot if it got others than it should;
    `attention` says which of them were read, as the column `attention_watched` does. Padding at the end is left out.
    """

    rows: Int64Array
    prefix_lens: Int64Array
    extend_lens: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    out_cache_loc: Int64Array
    written: list[ByteArray]
    table_changes: Int64Array
    lut_changes: Int64Array
    kv_changes: Int64Array
    seq_lens: Int64Array
    query_lens: Int64Array
    attention_slots: Int64Array
    attention: int
    complete: bool
    all_luts: bool
    note: str


class FrameReader:
    """Copies frames to the host by a stream of its own, into pinned memory that is used again; for one thread."""

    def __init__(self, capture: DeviceCapture) -> None:
        self._capture = capture
        self._stream: Any = None
        self._pinned: Any = None
        self._counters: Any = None

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory in use."""
        return 0 if self._pinned is None else int(self._pinned.shape[0]) * 8

    def use_device(self) -> None:
        """Take the engine's device for this thread's: it would be the first one, and get a context there for nothing."""
        if self._capture.on_gpu:
            import torch

            torch.cuda.set_device(self._capture.frames.device)

    def read(self, in_flight: FrameInFlight) -> Frame:
        """Wait until a frame is complete and return it."""
        layout, programs = in_flight.layout, in_flight.programs
        counters, fixed = self._fetch_fixed(in_flight)
        while self._capture.on_gpu and int(counters[DONE]) < programs:
            time.sleep(ASK_AGAIN_S)
            counters, fixed = self._fetch_fixed(in_flight)
        inputs = fixed[: layout.inputs].copy()
        bs, tokens = layout.bs, layout.tokens
        rows, prefix, extend = (inputs[i * bs : (i + 1) * bs] for i in range(3))
        ids, positions, loc = (inputs[3 * bs + i * tokens : 3 * bs + (i + 1) * tokens] for i in range(3))
        lens = fixed[layout.lens_at : layout.lens_at + 2 * bs].copy()
        real, real_tokens = _without_padding(in_flight, rows)
        written = []
        at = layout.inputs
        for words in layout.stream_words:
            content = fixed[at : at + real_tokens * words].copy()
            written.append(content.view(np.uint8).reshape(real_tokens, words * 8))
            at += tokens * words
        tables, all_tables = self._section(in_flight, counters, TABLE_CHANGES, layout.table_at, layout.table_entry)
        luts, all_luts = self._section(in_flight, counters, LUT_CHANGES, layout.lut_at, LUT_ENTRY)
        changed, all_changed = self._section(in_flight, counters, KV_CHANGES, layout.kv_at, layout.kv_entry)
        slots, all_slots = self._section(in_flight, counters, ATTENTION, layout.attention_at, ATTENTION_ENTRY)
        notes = (
            [] if all_changed else [f"{counters[KV_CHANGES]:,} slots changed; some are recorded with a later forward"]
        )
        if not all_slots:
            notes.append(f"attention got {counters[ATTENTION]:,} slots other than it should; they are not recorded")
        return Frame(
            rows=rows[:real],
            prefix_lens=prefix[:real],
            extend_lens=extend[:real],
            input_ids=ids[:real_tokens],
            positions=positions[:real_tokens],
            out_cache_loc=loc[:real_tokens],
            written=written,
            table_changes=_cells(tables),
            lut_changes=luts,
            kv_changes=changed,
            seq_lens=lens[:real],
            query_lens=lens[bs : bs + real],
            attention_slots=slots,
            attention=in_flight.attention if all_slots else in_flight.attention & ATTENTION_LENS,
            complete=all_tables and all_luts,
            all_luts=all_luts,
            note="; ".join(notes),
        )

    def _section(
        self, in_flight: FrameInFlight, counters: Int64Array, sort: int, start: int, entry: int
    ) -> tuple[Int64Array, bool]:
        """Return the entries of one sort of changes, `[n, entry]`, and whether they are all."""
        layout = in_flight.layout
        capacity = {
            TABLE_CHANGES: layout.table_capacity,
            LUT_CHANGES: layout.lut_capacity,
            KV_CHANGES: layout.kv_capacity,
            ATTENTION: layout.attention_capacity,
        }[sort]
        kept = min(int(counters[sort]), capacity)
        content = self._fetch(in_flight.at + start, kept * entry).copy() if kept else np.empty(0, np.int64)
        return content.reshape(kept, entry), kept == int(counters[sort])

    def _fetch_fixed(self, in_flight: FrameInFlight) -> tuple[Int64Array, Int64Array]:
        """Return the counters and what every frame has, in one wait; valid until the next fetch."""
        there = self._capture.counters[in_flight.counters]
        if not self._capture.on_gpu:
            return np.array(there.numpy()), self._fetch(in_flight.at, in_flight.layout.fixed)
        torch = self._prepare(in_flight.layout.fixed)
        with torch.cuda.stream(self._stream):
            self._counters.copy_(there, non_blocking=True)
        fixed = self._fetch(in_flight.at, in_flight.layout.fixed)
        return np.array(self._counters.numpy()), fixed

    def _fetch(self, at: int, words: int) -> npt.NDArray[np.int64]:
        """Return a stretch of the frames, valid until the next call."""
        if not self._capture.on_gpu:
            there: npt.NDArray[np.int64] = self._capture.frames[at : at + words].numpy()
            return there
        torch = self._prepare(words)
        with torch.cuda.stream(self._stream):
            self._pinned[:words].copy_(self._capture.frames[at : at + words], non_blocking=True)
        self._stream.synchronize()
        here: npt.NDArray[np.int64] = self._pinned[:words].numpy()
        return here

    def _prepare(self, words: int) -> Any:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(device=self._capture.frames.device)
            self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, pin_memory=True)
        if self._pinned is None or int(self._pinned.shape[0]) < words:
            size = 1 << max(words - 1, 1 << 16).bit_length()
            self._pinned = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        return torch


def _without_padding(in_flight: FrameInFlight, rows: Int64Array) -> tuple[int, int]:
    """Return how many requests and tokens of a frame count: those that the engine runs, and all that are no padding.

    A graph runs as many requests as it was captured with, with as many tokens each.
    """
    bs, tokens = in_flight.layout.bs, in_flight.layout.tokens
    if not 0 <= in_flight.bs < bs:
        return bs, tokens
    real = max(in_flight.bs, int(np.flatnonzero(rows).max(initial=-1)) + 1)
    return real, tokens // bs * real


def _cells(tiles: Int64Array) -> Int64Array:
    """Return the changed cells of tiles, `[n, 3]`: row, position, slot."""
    which, offset = np.nonzero(tiles[:, TABLE_ENTRY:] != UNCHANGED)
    found = np.empty((which.size, 3), np.int64)
    found[:, 0] = tiles[which, 0]
    found[:, 1] = tiles[which, 1] + offset
    found[:, 2] = tiles[which, TABLE_ENTRY + offset]
    return found


def split_kv_changes(frame: Frame, layout: FrameLayout) -> list[tuple[int, Int64Array, ByteArray]]:
    """Return `(stream, slots [n], bytes [n, capture_bytes])` of the changed slots, each once, ascending."""
    found = []
    for stream, words in enumerate(layout.stream_words):
        mine = frame.kv_changes[frame.kv_changes[:, 0] == stream] if len(frame.kv_changes) else frame.kv_changes
        if not len(mine):
            continue
        slots, first = np.unique(mine[:, 1], return_index=True)
        content = np.ascontiguousarray(mine[first, KV_ENTRY : KV_ENTRY + words]).view(np.uint8)
        found.append((stream, slots, content.reshape(len(slots), words * 8)))
    return found
