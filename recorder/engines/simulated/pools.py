"""The pools: the header's groups, the KV bytes and content of each slot, and the allocators of their pages."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import Int64Array
from ....kernels.ops.hash.kv_source import KvSource
from ....kernels.ops.hash.reference import splitmix64_words
from ...capture.kv_tensor import KvTensor
from ...trace import header
from .config import BrokenEngineError, EngineConfig

CAPTURE_BYTES = 16
TARGET, DRAFT = 0, 1
NO_PAGES: Final = np.empty(0, np.int64)
WordArray = npt.NDArray[np.uint64]

_FINITE = np.uint64(0xBFFFBFFFBFFFBFFF)  # of four bfloat16: no exponent of all ones
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLayout:
    """The header; the groups whose slots are the full pool's, target and draft; and the sliding one, -1 if there is none."""

    header: header.TraceHeader
    full_groups: tuple[int, ...]
    swa_group: int


def make_layout(config: EngineConfig) -> SimulatedLayout:
    """Return header and group indices of an engine."""
    size, bytes_per_token = config.page_size, config.kv_bytes_per_token
    host_slots = (config.host_pages + 1) * size if config.host_pages else 0
    full = {"num_slots": (config.num_pages + 1) * size, "host_num_slots": host_slots}
    sliding = {"num_slots": (config.swa_pages + 1) * size, "kind": "swa", "window": config.window, "lut": 0}
    named: dict[str, dict[str, Any]] = {}
    if config.shape != "dsv4":
        named["full"] = full
    if config.sliding:
        named["swa"] = sliding
    if config.eagle:
        named["draft"] = {"runner": DRAFT, **full}
    halves = ("K",) if config.shape in ("mla", "dsv4") else ("K", "V")
    groups = []
    for name, what in named.items():
        streams = tuple(
            header.KvStream(
                half=half, layer=int(name == "swa"), bytes_per_token=bytes_per_token, capture_bytes=CAPTURE_BYTES
            )
            for half in (halves if config.shape != "dsv4" else ())
        )
        layers = tuple(range(config.sampled_layers)) if streams else ()
        streams += tuple(
            dataclasses.replace(stream, layer=0, layers=layers, seed=config.seed & 0xFFFFFFFF, dtype="bfloat16")
            for stream in (streams if layers else ())
        )
        what |= {"num_layers": max(1, len(layers)), "halves": halves, "streams": streams}
        groups.append(header.PoolGroup(name=name, page_size=size, **what))
    runners = (header.Runner(), header.Runner(name="draft", token_offset=1))[: 1 + config.eagle]
    captured = {group.runner for group in groups if group.streams and not config.submitted}
    made = header.TraceHeader(
        engine=header.EngineInfo(name="simulated", version="1"),
        model=header.ModelInfo(name=f"simulated-{config.shape}", dtype="bytes"),
        groups=tuple(groups),
        tables=(header.StateTable(rows=config.rows, width=config.width),),
        lut_lens=(full["num_slots"],) if config.sliding else (),
        truth_table=header.StateTable(name="truth", rows=config.rows, width=config.width),
        runners=runners,
        role=config.role,
        slot_history="complete",
        not_watched=tuple(
            header.NotWatched(what="submitted", name=runners[number].name, reason="not configured")
            for number in captured
        ),
        sweep_interval=config.sweep_interval,
        states=(header.StatePool(name="recurrent", num_slots=config.state_slots, num_layers=1, hashed_bytes=16),)
        * config.recurrent,
        oracle=header.Oracle(vocab_size=config.vocab_size) if config.sampler == "oracle" else None,
    )
    numbers = {name: number for number, name in enumerate(named)}
    full_groups = tuple(number for name, number in numbers.items() if name != "swa")
    return SimulatedLayout(header=made, full_groups=full_groups, swa_group=numbers.get("swa", -1))


class KvPool:
    """One pool group: `arrays` holds `content` `[num_slots] uint64`, the word that stands for a slot's whole KV, and the
    `[num_slots, words] uint64` of each captured layer and half; `host_arrays` the same for the host tier. Of a stream that
    samples layers it holds all of them, one after another, as floats of which none is infinite or NaN.
    """

    def __init__(self, group: header.PoolGroup, *, index: int) -> None:
        self.group = group
        self.index = index
        self.arrays, self.host_arrays = (
            [np.zeros(size, np.uint64), *(np.zeros((size, _words(stream)), np.uint64) for stream in group.streams)]
            for size in (group.num_slots, group.host_num_slots)
        )
        self.content: WordArray = self.arrays[0]
        self.submitted: dict[int, WordArray] = {}  # what was handed in last, `[n, words]` for each stream
        self._salts = [
            splitmix64_words((np.arange(words.shape[1], dtype=np.uint64) + np.uint64(1 + 97 * number)) * _GAMMA)
            for number, words in enumerate(self.arrays[1:])
        ]

    def sources(self) -> list[KvSource | KvTensor]:
        """Return the pool's bytes as the recorder takes them, a stream each."""
        size = self.group.page_size
        found: list[KvSource | KvTensor] = []
        for words, stream in zip(self.arrays[1:], self.group.streams, strict=True):
            if stream.samples:
                layers = words.reshape(len(words), len(stream.layers), -1).swapaxes(0, 1)
                found.append(KvTensor(tensor=tuple(layers), axes="slot word"))
                continue
            pages, width = words.view(np.uint8).reshape(self.group.num_slots // size, -1), stream.bytes_per_token
            found.append(KvSource(tensor=pages, page_size=size, bytes_per_token=width, read_bytes=width))
        return found

    def stream_bytes(self, stream: int) -> npt.NDArray[np.uint8]:
        """Return one stream as `[num_slots, bytes_per_token] uint8`, a view that may be written."""
        return self.arrays[1 + stream].view(np.uint8)

    def write(self, slots: Int64Array, content: WordArray, noise: WordArray | None) -> None:
        """Write tokens' KV: bytes follow from the content word, but for the low bits that `noise` flips. `slots` `[n]
        int64`, `content`, `noise` `[n] uint64`. If a slot comes twice, the last write stays.
        """
        self.content[slots] = content
        for number, (words, salt) in enumerate(zip(self.arrays[1:], self._salts, strict=True)):
            rows = splitmix64_words(content[:, None] ^ salt)
            if self.group.streams[number].samples:
                rows &= _FINITE
            self.submitted[number] = words[slots] = rows if noise is None else rows ^ noise[:, None]

    def copy(self, src: Int64Array, dst: Int64Array) -> None:
        """Copy whole slots within the pool."""
        copy_slots(self.arrays, src, self.arrays, dst)

    def to_host(self, slots: Int64Array, host_slots: Int64Array) -> None:
        """Copy whole slots from the pool to the host tier."""
        copy_slots(self.arrays, slots, self.host_arrays, host_slots)

    def from_host(self, host_slots: Int64Array, slots: Int64Array) -> None:
        """Copy whole slots from the host tier to the pool."""
        copy_slots(self.host_arrays, host_slots, self.arrays, slots)


def _words(stream: header.KvStream) -> int:
    return stream.bytes_per_token // 8 * (len(stream.layers) if stream.samples else 1)


def copy_slots(source: Sequence[WordArray], src: Int64Array, target: Sequence[WordArray], dst: Int64Array) -> None:
    """Copy content and bytes of whole slots between two pools or tiers."""
    for here, there in zip(source, target, strict=True):
        there[dst] = here[src]


class PageAllocator:
    """Hands out pages 1 .. num_pages. A clean engine never gives back what it does not hold; `check_free` raises, where
    a real allocator would append the page to its free list and hand it out twice.
    """

    def __init__(self, num_pages: int, *, free_order: str = "lifo", name: str = "full", seed: int = 0) -> None:
        self.num_pages = num_pages
        self.name = name
        self._fifo = free_order == "fifo"
        order = np.arange(1, num_pages + 1) if self._fifo else np.arange(num_pages, 0, -1)
        if free_order == "shuffled":
            np.random.default_rng([seed, 0xA110]).shuffle(order)
        self._free: deque[int] = deque(order.tolist())
        self._held = np.zeros(num_pages + 1, np.bool_)

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def alloc(self, count: int) -> Int64Array | None:
        """Return `count` pages, or None if there are not as many."""
        if count > len(self._free):
            return None
        take = self._free.popleft if self._fifo else self._free.pop
        pages = np.array([take() for _ in range(count)], np.int64)
        self._held[pages] = True
        return pages

    def free(self, pages: Int64Array) -> None:
        """Take pages back."""
        if pages.size:
            self.check_free(pages)
            self._held[pages] = False
            self._free.extend(pages.tolist())

    def check_free(self, pages: Int64Array) -> None:
        """Raise `BrokenEngineError` if a page is given back that is not held, or twice at once."""
        if not self._held[pages].all() or (pages.size > 1 and np.unique(pages).size != pages.size):
            raise BrokenEngineError(f"the {self.name} pool: pages {pages.tolist()} are freed, not all of them are held")

    def held_pages(self) -> Int64Array:
        """Return the pages that are handed out, ascending."""
        return np.flatnonzero(self._held).astype(np.int64)


class SlidingWindowPool:
    """Keeps the pairing of full pages with sliding-window pages; `lut` `[full slots] int64`, 0 if there is none."""

    def __init__(self, config: EngineConfig, lut: Int64Array) -> None:
        order: dict[str, Any] = {"free_order": config.free_order, "seed": config.seed}
        self.window = config.window
        self.pages = PageAllocator(config.swa_pages, name="sliding-window", **order)
        self._page_size = config.page_size
        self._by_page = lut.reshape(-1, config.page_size)

    def pair(self, full_pages: Int64Array, swa_pages: Int64Array) -> None:
        """Let full pages lead to sliding-window pages, slot by slot."""
        self._by_page[full_pages] = swa_pages[:, None] * self._page_size + np.arange(self._page_size)

    def paired(self, full_pages: Int64Array) -> Int64Array:
        """Return the sliding-window page of each full page, 0 if there is none."""
        return self._by_page[full_pages, 0] // self._page_size

    def part(self, full_pages: Int64Array) -> Int64Array:
        """Give back the sliding-window halves of full pages, those that still have one, and return them."""
        swa_pages = self.paired(full_pages)
        held = swa_pages > 0
        self.unpair(full_pages[held])
        self.pages.free(swa_pages[held])
        return swa_pages[held]

    def unpair(self, full_pages: Int64Array) -> None:
        """Let full pages lead nowhere: a stale entry would point into another request's page."""
        self._by_page[full_pages] = 0

    def move(self, full_page: int, to: int) -> None:
        """Hand the sliding-window half of one full page to another."""
        self._by_page[to] = self._by_page[full_page]
        self._by_page[full_page] = 0

    def first_needed_page(self, prefix: int) -> int:
        """Return the first page that a forward with this prefix still reads."""
        return max(0, prefix - self.window) // self._page_size
