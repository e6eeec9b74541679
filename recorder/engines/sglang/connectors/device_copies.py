"""HiCache's copies between a device and pinned memory: both ends are hashed by the device, and nothing waits for a hash.

A look is launched on the stream of the copy: right before it, behind all that the copy itself waits for, and right behind it. Of
each page and layer up to 256 bytes are looked at, in pieces that lie evenly apart.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import BoolArray, Int64Array
from .....kernels.ops.end_hash.reference import part_words
from ....capture.device.host_copy import HostCopy
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import CopyEnds
from ...common.copy_bounds import MAX_LOOKED_AT
from ...common.end_looks import Sums
from .host_pools import copy_sides, first_slots, record_held
from .storage import Storage
from .unknown import OF_OTHERS, record_unknown

WORDS: Final = 64  # of each page and layer

# The streams of a controller's stores and loads, by the names that its versions have: its own, or its engine's; and whom it fences.
STORES: Final = ("write_stream", "device_to_host_stream", "write_fence_stream")
LOADS: Final = ("load_stream", "host_to_device_stream", "load_fence_stream")

HERE, THERE = range(2)  # the engine's pool and the host's


class Pages(NamedTuple):
    """What is copied: how many pages, which of them are looked at in each pool, and how all slots are had later."""

    num: int
    pool: Any
    host: Any
    slots: Callable[[], tuple[Int64Array, Int64Array]]


class DeviceCopies:
    """Records what one controller copies; `here` and `there` are the layers of both pools, as `pool_layers` gives them.

    Raises:
        ValueError: the device cannot read them.
    """

    def __init__(self, controller: Any, recorder: DeviceRecorder, here: Sequence[Any], there: Sequence[Any]) -> None:
        import torch

        from .....kernels.ops.end_hash.triton import end_sums

        self._controller, self._recorder, self._sums = controller, recorder, end_sums
        self._page_size = page_size = int(controller.page_size)
        self.storage: Storage | None = None
        self._device = here[0].device
        if self._device.type == "cuda" and not all(layer.is_pinned() for layer in there):
            raise ValueError("the host's pool is not pinned")
        self._pools: list[tuple[Any, int]] = []  # by which words the device finds each pool's parts, and its pages
        for layers in _rows(here, there, page_size):
            words = torch.tensor(part_words(layers, most=WORDS), dtype=torch.int64)
            self._pools.append((words.to(self._device), layers[0].shape[0]))
            self._most = max(1, MAX_LOOKED_AT // (len(layers) * 4 * WORDS))
        self._loaded: Any = None  # the device's word that what was loaded last has been looked at
        end_sums(self._pools[HERE][0], torch.zeros((2, 1), dtype=torch.int64, device=self._device))  # compiles it

    def asked(self, pool: Any, host: Any) -> None:
        """Forget what lay in slots that are to be loaded."""
        self._recorder.forget_slots(0, pool)

    def flush(self) -> None:
        """Do nothing: what lies on the host is looked at right behind each store."""

    before_forward = flush

    def there(self, pages: Int64Array) -> Int64Array:
        """Return zeros: a storage's threads do not wait for a device."""
        return np.zeros(pages.size, np.int64)

    @contextlib.contextmanager
    def store(self, ops: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """Record slots that go to the host while the controller begins it."""
        pages, begun = self._pages(ops), 0 if self.storage is None else self.storage.fetches
        with self._stream(STORES) as behind:
            behind()
            given = self._look(HERE, pages)
        yield
        with self._stream(STORES):
            held = self._look(THERE, pages)

        def record() -> None:
            (pool, host), zeros = pages.slots(), np.zeros(pages.num, np.int64)
            self._record("offload", pool, host, CopyEnds(given.read(), zeros, zeros, zeros - 1), to_host=True)
            firsts, found = first_slots(host, self._page_size), held.read()
            if self.storage is not None:  # another page may have lain there by then
                found[self.storage.fetched_since(begun, firsts)] = 0
            record_held(self._recorder.recorder, firsts, found)

        self._recorder.later(self._guarded, record)

    @contextlib.contextmanager
    def load(self, ops: Sequence[tuple[Any, Any]], unknown: BoolArray) -> Iterator[None]:
        """Record slots that come back while the controller begins it; `unknown` `[n]`: somebody else has stored what they get."""
        pages = self._pages(ops)
        with self._stream(LOADS) as behind:
            behind()
            there, before = self._look(THERE, pages), self._look(HERE, pages)
        yield
        with self._stream(LOADS):
            here = self._look(HERE, pages)
            self._loaded = self._now()

        def record() -> None:
            (pool, host), known = pages.slots(), ~unknown[:: self._page_size]
            was_there, is_here, was_here = (look.read()[known] for look in (there, here, before))
            ends = CopyEnds(was_there, is_here, was_here, np.full(was_there.size, -1, np.int64))
            self._record("load-back", pool[~unknown], host[~unknown], ends, to_host=False)
            if unknown.any():
                record_unknown(self._recorder.recorder, 0, pool, OF_OTHERS, which=unknown)

        self._recorder.later(self._guarded, record)

    def after_forward(self) -> None:
        """Have what comes behind a forward wait until what was loaded for it was looked at: later ones may write there."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(loaded)

    @contextlib.contextmanager
    def _stream(self, names: tuple[str, str, str]) -> Iterator[Callable[[], None]]:
        """Launch on the stream of a controller's copies; what is given has it wait for all that these wait for."""
        if self._device.type != "cuda":
            yield lambda: None
            return
        import torch

        own, of_engine, fence = names
        stream = getattr(self._controller, own, None)
        if stream is None:
            stream = getattr(self._controller.l2_transfer_engine, of_engine)
        others = torch.cuda.current_stream(self._device), getattr(self._controller, fence, None)

        def behind() -> None:
            for other in others:
                if other is not None:
                    stream.wait_stream(other)

        with torch.cuda.stream(stream):
            yield behind

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return None
        import torch

        return torch.cuda.current_stream(self._device).record_event()

    def _pages(self, ops: Sequence[tuple[Any, Any]]) -> Pages:
        import torch

        pool, host = (torch.cat([side.reshape(-1) for side in sides]) for sides in zip(*ops, strict=True))
        slots, num = (HostCopy(pool), HostCopy(host)), -(-pool.numel() // self._page_size)
        wanted = [self._wanted(which, side) for which, side in ((HERE, pool), (THERE, host))]
        return Pages(num, wanted[0], wanted[1], lambda: (slots[0].read(), slots[1].read()))

    def _wanted(self, which: int, slots: Any) -> Any:
        """Return the pages of a pool that are looked at, as the device is told of them."""
        import torch

        pages = slots[:: self._page_size][: self._most].long() // self._page_size
        pages = pages.clamp(0, self._pools[which][1] - 1)  # whatever the engine copies
        wanted = torch.stack([pages, torch.zeros_like(pages)])
        if wanted.device == self._device:
            return wanted
        return wanted.pin_memory().to(self._device, non_blocking=True)

    def _look(self, which: int, pages: Pages) -> Sums:
        """Look at pages of a pool when the current stream comes to this point."""
        wanted = (pages.pool, pages.host)[which]
        if wanted.is_cuda:
            import torch

            wanted.record_stream(torch.cuda.current_stream(self._device))
        sums = HostCopy(self._sums(self._pools[which][0], wanted).sum(2))
        return Sums(pages.num, [(list(range(wanted.shape[1])), sums)])

    def _guarded(self, record: Callable[[], None]) -> None:
        """Record something on the recorder's thread; what is copied may not be whole pages."""
        try:
            record()
        except ValueError as error:
            self._recorder.recorder.lost(str(error))

    def _record(self, note: str, pool: Int64Array, host: Int64Array, ends: CopyEnds, *, to_host: bool) -> None:
        """Record pages that are copied, one run each."""
        size = self._page_size
        pages = first_slots(pool, size), first_slots(host, size)
        count = np.full(ends.src.size, size, np.int64)
        self._recorder.recorder.kv_copy(count=count, ends=ends, **copy_sides(note, *pages, to_host=to_host))


def _rows(here: Sequence[Any], there: Sequence[Any], page_size: int) -> tuple[list[Any], list[Any]]:
    """Return each pool's layers as `[pages, bytes]`: whole pages, or the first and last token of each if tokens lie apart.

    Raises:
        ValueError: the bytes of a token lie apart, too.
    """
    import torch

    for tokens in ([slice(None)], sorted({0, page_size - 1})):
        with contextlib.suppress(RuntimeError):  # no view of that shape
            found = [
                [layer.view(torch.uint8)[:, token].view(layer.shape[0], -1) for layer in layers for token in tokens]
                for layers in (here, there)
            ]
            return found[0], found[1]
    raise ValueError("the bytes of a token lie apart in the host's pool")
