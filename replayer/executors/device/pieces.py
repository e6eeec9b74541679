"""Pieces of a trace on their way through the device: copied on a side stream, stepped, and drained, two at a time."""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kernels.gpu import step
from ....recorder.trace.batch import TraceBatch
from ....recorder.trace.header import TraceHeader
from .found import VERIFY_ORDER, WRITE_ORDER, Found, in_order
from .launches import INTERPRETED, ON_GPU, Launches, Programs
from .packing import Packed
from .state import DeviceState

Int64Array = npt.NDArray[np.int64]

AT_ONCE: Final = 2
FEWEST_ROWS = 1 << 16  # of a log, to begin with


@dataclass(slots=True, kw_only=True)
class Piece:
    """Events `first` to `end` of a batch; `steps` `[events] int64` gives each one's step, -1 for none.

    Drained: `done` steps were taken; `stuck` says why no more were, "host" (the next one is for the host) or "full" (its
    rows found no room); `verify` and `write` are the rows found, in order, of which step i's are `verify_at[i] ..
    verify_at[i + 1]`.
    """

    batch: TraceBatch
    first: int
    end: int
    steps: Int64Array
    reads: Int64Array
    written: Int64Array
    done: int = 0
    stuck: str = ""
    drained: bool = False
    stats: Int64Array = field(default_factory=lambda: np.zeros((0, step.MAX_GROUPS, step.STAT_WORDS), np.int64))
    verify: Int64Array = field(default_factory=lambda: np.zeros((0, step.FOUND_WORDS), np.int64))
    write: Int64Array = field(default_factory=lambda: np.zeros((0, step.FOUND_WORDS), np.int64))
    verify_at: Int64Array = field(default_factory=lambda: np.zeros(1, np.int64))
    write_at: Int64Array = field(default_factory=lambda: np.zeros(1, np.int64))

    def quiet_until(self, at: int) -> int:
        """Return the first event from `at` on that has found rows or was not stepped as it should, `end` for none."""
        if not len(self.reads):
            return self.end
        noisy = np.concatenate(
            [self.verify[:, step.FOUND_STEP], self.write[:, step.FOUND_STEP], np.arange(self.done, len(self.reads))[:1]]
        )
        of_event = np.flatnonzero(np.isin(self.steps[at - self.first :], noisy))
        return at + int(of_event[0]) if len(of_event) else self.end

    def found(self, number: int) -> Found:
        """Return what was found in a step that was taken."""
        return Found(
            reads=self.reads[number],
            stats=self.stats[number],
            written=int(self.written[number]),
            verify=self.verify[self.verify_at[number] : self.verify_at[number + 1]],
            write=self.write[self.write_at[number] : self.write_at[number + 1]],
        )


class Berth:
    """Memory of one piece under way: where it is packed, where it lies, and what its kernels leave behind."""

    def __init__(self, torch: Any, device: Any, rows: int) -> None:
        self._torch = torch
        self._device = device
        self.packed = self._pinned(1 << 16)
        self.words = self._empty(1 << 16)
        self.result = self._empty(step.RESULT_WORDS + 64 * step.MAX_GROUPS * step.STAT_WORDS)
        self.told = self._pinned(len(self.result))
        self.log = self._empty(rows * step.FOUND_WORDS)
        self.write_log = self._empty(rows * step.FOUND_WORDS)
        self.finished = torch.cuda.Event() if device.type == "cuda" else None
        self.piece: Piece | None = None

    def _empty(self, words: int) -> Any:
        return self._torch.empty(words, dtype=self._torch.int64, device=self._device)

    def _pinned(self, words: int) -> Any:
        return self._torch.empty(words, dtype=self._torch.int64, pin_memory=self._device.type == "cuda")

    def make_room(self, *, words: int, steps: int, rows: int, write_rows: int) -> None:
        """Grow what is too small; nothing in it is kept."""
        if words > len(self.words):
            self.packed, self.words = self._pinned(2 * words), self._empty(2 * words)
        told = step.RESULT_WORDS + steps * step.MAX_GROUPS * step.STAT_WORDS
        if told > len(self.result):
            self.result, self.told = self._empty(2 * told), self._pinned(2 * told)
        if rows * step.FOUND_WORDS > len(self.log):
            self.log = self._empty(rows * step.FOUND_WORDS)
        if write_rows * step.FOUND_WORDS > len(self.write_log):
            self.write_log = self._empty(write_rows * step.FOUND_WORDS)


class Pieces:
    """Steps pieces on the device in the order in which they are given."""

    def __init__(self, header: TraceHeader, state: DeviceState) -> None:
        import torch

        self._torch = torch
        self._state = state
        self._device = state.device
        self._on_gpu = state.device.type == "cuda"
        self.programs: Programs = ON_GPU if self._on_gpu else INTERPRETED
        self._rows = self._write_rows = FEWEST_ROWS
        self._root = torch.zeros(step.ROOT_WORDS, dtype=torch.int64, device=state.device)
        self._launches = Launches(header, self._root, self.programs)
        self._scratch: list[Any] = []
        self._scratch_size = (0, 0)
        self._berths = [Berth(torch, state.device, FEWEST_ROWS) for _ in range(AT_ONCE)]
        self._next = 0
        if self._on_gpu:
            self.stream = torch.cuda.Stream(state.device)
            self._copies = torch.cuda.Stream(state.device)
            self.stream.wait_stream(torch.cuda.current_stream(state.device))  # for the zeros in the state

    def submit(self, piece: Piece, packed: Packed) -> None:
        """Have a piece copied and stepped behind those under way, of which there is at most one; waits for nothing."""
        berth = self._berths[self._next]
        self._next = (self._next + 1) % AT_ONCE
        self._write_rows = max(self._write_rows, 4 * packed.write_rows)
        berth.make_room(words=packed.words.total, steps=packed.steps, rows=self._rows, write_rows=self._write_rows)
        berth.piece = piece
        if not packed.steps:
            return
        if not self._on_gpu:
            self._start(berth, packed)
            return
        with self._torch.cuda.stream(self.stream):
            self._start(berth, packed)

    def _start(self, berth: Berth, packed: Packed) -> None:
        self._make_scratch(packed)
        block, result = packed.block, berth.result
        block[step.PIECE_DESCRIPTORS] = berth.words.data_ptr() + 8 * packed.descriptors_at
        block[step.PIECE_STEPS] = packed.steps
        block[step.PIECE_RESULT] = result.data_ptr()
        block[step.PIECE_STATS] = result.data_ptr() + 8 * step.RESULT_WORDS
        block[step.PIECE_LOG], block[step.PIECE_LOG_ROWS] = berth.log.data_ptr(), len(berth.log) // step.FOUND_WORDS
        block[step.PIECE_WRITE_LOG] = berth.write_log.data_ptr()
        block[step.PIECE_WRITE_LOG_ROWS] = len(berth.write_log) // step.FOUND_WORDS
        own, chain, seeds = self._scratch
        block[step.PIECE_OWN], block[step.PIECE_CHAIN] = own.data_ptr(), chain.data_ptr()
        block[step.PIECE_TOKEN_STRIDE], block[step.PIECE_REQUEST_STRIDE] = self._scratch_size
        block[step.PIECE_SEEDS] = seeds.data_ptr()
        block[-1] = berth.words.data_ptr()
        total = packed.words.total
        packed.words.write(berth.packed.numpy(), berth.words.data_ptr())
        told = step.RESULT_WORDS + packed.steps * step.MAX_GROUPS * step.STAT_WORDS
        if self._on_gpu:
            with self._torch.cuda.stream(self._copies):
                berth.words[:total].copy_(berth.packed[:total], non_blocking=True)
            self.stream.wait_stream(self._copies)
        else:
            berth.words[:total].copy_(berth.packed[:total])
        result[:told].zero_()
        self._root[:1].copy_(berth.words[step.PIECE_WORDS - 1 : step.PIECE_WORDS])
        self._launches.run(packed.steps, packed.special)
        berth.told[:told].copy_(result[:told], non_blocking=self._on_gpu)
        if berth.finished is not None:
            berth.finished.record(self.stream)

    def _make_scratch(self, packed: Packed) -> None:
        tokens, requests = self._scratch_size
        if packed.most_tokens > tokens or packed.most_requests > requests:
            tokens, requests = max(tokens, 2 * packed.most_tokens), max(requests, 2 * packed.most_requests)
            shapes = [(step.MAX_GROUPS, tokens), (step.MAX_GROUPS, tokens), (step.MAX_GROUPS, requests, 2)]
            self._scratch = [self._torch.empty(shape, dtype=self._torch.int64, device=self._device) for shape in shapes]
            self._scratch_size = (tokens, requests)

    def drain(self, piece: Piece) -> None:
        """Wait for a piece, the first of those under way, and take what its kernels found."""
        berth = next(berth for berth in self._berths if berth.piece is piece)
        berth.piece = None
        piece.drained = True
        steps = len(piece.reads)
        if not steps:
            return
        if berth.finished is not None:
            berth.finished.synchronize()
        told = berth.told.numpy()
        piece.done = int(told[step.RESULT_DONE])
        rows, write_rows = int(told[step.RESULT_ROWS]), int(told[step.RESULT_WRITE_ROWS])
        room, write_room = len(berth.log) // step.FOUND_WORDS, len(berth.write_log) // step.FOUND_WORDS
        if piece.done < steps:
            piece.stuck = "host" if told[step.RESULT_HOST] else "full"
            if piece.stuck == "full":
                self._rows = max(self._rows, 2 * rows)
                self._write_rows = max(self._write_rows, 2 * write_room)
        size = steps * step.MAX_GROUPS * step.STAT_WORDS
        stats = told[step.RESULT_WORDS : step.RESULT_WORDS + size].copy()
        piece.stats = stats.reshape(steps, step.MAX_GROUPS, step.STAT_WORDS)
        piece.verify = in_order(self._taken(berth.log, min(rows, room), piece.done), VERIFY_ORDER)
        piece.write = in_order(self._taken(berth.write_log, min(write_rows, write_room), piece.done), WRITE_ORDER)
        bounds = np.arange(piece.done + 1)
        piece.verify_at = np.searchsorted(piece.verify[:, step.FOUND_STEP], bounds)
        piece.write_at = np.searchsorted(piece.write[:, step.FOUND_STEP], bounds)

    def _taken(self, log: Any, count: int, done: int) -> Int64Array:
        if not count:
            return np.zeros((0, step.FOUND_WORDS), np.int64)
        rows: Int64Array = log[: count * step.FOUND_WORDS].cpu().numpy().reshape(-1, step.FOUND_WORDS)
        return rows[rows[:, step.FOUND_STEP] < done]

    def stop(self) -> None:
        """Wait until nothing is under way and forget what was behind a stuck piece: it was not stepped."""
        self.wait()
        for berth in self._berths:
            berth.piece = None
        self._root.zero_()
        self.wait()

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._on_gpu:
            self._torch.cuda.synchronize(self._device)
