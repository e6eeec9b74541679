"""Reading the next batch of a trace while the last one is replayed: decoding and compiled loops both leave Python's lock."""

import _thread
import queue
from collections.abc import Generator
from contextlib import suppress
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class ReadAhead(Generic[_Item]):
    """An iterator over a generator that runs in a thread of its own, a little ahead: one item is here, one lies ready, one
    is being made.

    What the generator raises is raised here, where it would have been. `close` ends both, after Ctrl-C too: wherever that
    struck, nobody waits for somebody who cannot be woken. `queue.Queue` and `threading.Thread` do not promise that, since
    they are made of several steps; locks and the simple queue are of one.
    """

    def __init__(self, source: Generator[_Item, None, None]) -> None:
        self._source = source
        self._ready: queue.SimpleQueue[tuple[_Item | None, BaseException | None]] = queue.SimpleQueue()
        self._full = _thread.allocate_lock()  # held while an item lies ready
        self._owned = _thread.allocate_lock()  # whoever gets it closes the source
        self._done = _thread.allocate_lock()  # held until the source is closed
        self._done.acquire()
        self._begun = False
        self._closing = False
        self._ended = False

    def __iter__(self) -> "ReadAhead[_Item]":
        return self

    def __next__(self) -> _Item:
        if self._ended:
            raise StopIteration
        if not self._begun:
            self._begun = True
            _thread.start_new_thread(self._read, ())
        item, error = self._ready.get()
        if item is None:
            self._ended = True
            if error is not None:
                raise error
            raise StopIteration
        self._make_room()
        return item

    def close(self) -> None:
        """Close the source; nothing comes any more."""
        self._closing = self._ended = True
        if self._owned.acquire(blocking=False):
            self._close_source(None)
            return
        while not self._done.acquire(timeout=0.01):
            self._make_room()
        self._done.release()

    def _make_room(self) -> None:
        with suppress(RuntimeError):  # there is room
            self._full.release()

    def _read(self) -> None:
        if not self._owned.acquire(blocking=False):
            return
        error: BaseException | None = None
        try:
            for item in self._source:
                self._full.acquire()
                if self._closing:
                    break
                self._ready.put((item, None))
                del item  # what is replayed must not be held here
        except BaseException as raised:  # noqa: BLE001  # whatever it is, it belongs to whoever asks for the next item
            error = raised
        finally:
            self._close_source(error)

    def _close_source(self, error: BaseException | None) -> None:
        try:
            self._source.close()
        finally:
            self._ready.put((None, error))
            self._done.release()
