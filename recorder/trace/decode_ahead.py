"""Decoding the next batches of a large trace while the last one is looked at, on the cores that there are.

What a batch holds does not depend on who decodes it, so nothing but time changes: frames are asked for in order, and a
batch that was decoded and is not asked for (a file that was cut, damage before it) is forgotten.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from .batch import TraceBatch
from .checksum import ColumnForm
from .decode import decode_batch
from .framing import RECORD_BATCH, Frame, FramingError, read_frame
from .trace_bytes import TraceBytes

# Threads are not worth their start for less than this.
LARGE_BYTES: Final = 4 << 20
# Batches in flight, each no larger in the file than this: memory has a bound, however long the trace is.
_AHEAD: Final = 2
_MOST_BYTES: Final = 16 << 20


class DecodeAhead:
    """Gives frames and their batches, some of them decoded before they are asked for; `close` ends its threads.

    Only compressed batches are: to read what lies in the file as it is takes less than to hand it to a thread.
    """

    def __init__(self, source: TraceBytes, schema: pa.Schema, forms: list[ColumnForm]) -> None:
        self._source, self._schema, self._forms = source, schema, forms
        self._pending: dict[int, tuple[Frame, Future[TraceBatch]]] = {}
        workers = min(_AHEAD, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        threads = source.size() >= LARGE_BYTES and workers > 1
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode ahead") if threads else None
        self._head = schema.serialize().to_pybytes() if threads else b""  # the message before a batch in a stream

    def frame(self, position: int, limit: int) -> Frame | None:
        """Return what `read_frame` does."""
        known = self._pending.get(position)
        return known[0] if known and known[0].end <= limit else read_frame(self._source, position, limit)

    def batch(self, frame: Frame, limit: int) -> TraceBatch:
        """Return what `decode_batch` does for a frame; `limit` is where messages end."""
        known = self._pending.pop(frame.start, None)
        if self._threads is not None and frame.compression is not None:
            self._look_ahead(frame, limit, self._threads)
        if known and known[0] is frame:
            return known[1].result()
        return decode_batch(self._source, frame, self._schema, self._forms)

    def close(self) -> None:
        """Forget what was not asked for, and wait for what is under way."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self._pending.clear()

    def _look_ahead(self, frame: Frame, limit: int, threads: ThreadPoolExecutor) -> None:
        self._pending = {start: other for start, other in self._pending.items() if start >= frame.end}
        position = max((other.end for other, _ in self._pending.values()), default=frame.end)
        while len(self._pending) < _AHEAD:
            try:
                other = read_frame(self._source, position, limit)
            except FramingError:  # told when the walk comes there
                return
            if other is None or other.kind != RECORD_BATCH or other.compression is None:
                return
            if other.end - other.start > _MOST_BYTES:
                return
            self._pending[position] = other, threads.submit(self._decode, other)
            position = other.end

    def _decode(self, frame: Frame) -> TraceBatch:
        return decode_batch(self._source, frame, self._schema, self._forms, self._head)
