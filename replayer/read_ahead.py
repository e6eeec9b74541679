"""Reading the next batch of a trace while the last one is replayed: decoding and compiled loops both leave Python's lock."""

import queue
import threading
from collections.abc import Generator
from typing import Final, Generic, TypeVar

_Item = TypeVar("_Item")

# One batch is being replayed, one lies ready, one is being read.
_READY: Final = 1


class ReadAhead(Generic[_Item]):
    """An iterator over a generator that runs in a thread of its own, a little ahead.

    What the generator raises is raised here, where it would have been. `close` ends both.
    """

    def __init__(self, source: Generator[_Item, None, None]) -> None:
        self._source = source
        self._ready: queue.Queue[tuple[_Item | None, BaseException | None]] = queue.Queue(_READY)
        self._closing = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def __iter__(self) -> "ReadAhead[_Item]":
        return self

    def __next__(self) -> _Item:
        if self._ended:
            raise StopIteration
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)
            self._thread.start()
        item, error = self._ready.get()
        if item is None:
            self._ended = True
            if error is not None:
                raise error
            raise StopIteration
        return item

    def close(self) -> None:
        """Close the source; nothing comes any more."""
        self._closing = self._ended = True
        if self._thread is None:
            self._source.close()
            return
        while self._thread.is_alive():
            try:  # the thread may wait for room
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source:
                if self._closing:
                    break
                self._ready.put((item, None))
                del item  # what is replayed must not be held here
        except BaseException as raised:  # noqa: BLE001  # whatever it is, it belongs to whoever asks for the next item
            error = raised
        finally:
            self._source.close()
            self._ready.put((None, error))
