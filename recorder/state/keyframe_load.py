"""Putting a keyframe back: the state as it was when the recorder wrote it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray, Int64Array, record_words
from ...kernels.constants import RECORD_KV_HASH, KvHashMode
from ...kernels.replay_pass.ledger import HELD, OWNER, STATE
from ..capture.host_arrays import runs_to_slots
from ..trace import schema
from ..trace.batch import TraceBatch
from ..trace.reader import EventView
from .forward import UnusableEventError, read_forward
from .history import ReplayState
from .keyframe import WORDS, KeyframeLabels, places, tiers

AnyArray = npt.NDArray[Any]

# Shorter runs than this in the mean are put in place by their indices, all at once.
_LONG_RUN: Final = 16
# What is copied to several places goes in chunks of so many rows, which stay in the processor's cache.
_CHUNK_ROWS: Final = 2048


class KeyframeRows:
    """The rows of array `name` that a part of a keyframe names, and their bytes one after another. Raises
    `UnusableEventError` if there are no such rows among its `limit`, or the bytes are not theirs.
    """

    def __init__(self, view: EventView, name: str, *, limit: int, row_bytes: int) -> None:
        starts, counts, data = view.ints("state_start"), view.ints("state_count"), view.bytes("state_bytes")
        # Differences, not sums: hostile numbers wrap around.
        if bool(((starts < 0) | (counts < 0) | (starts > limit) | (counts > limit - starts)).any()):
            raise UnusableEventError(f"rows of {name} that there are not, it has {limit}")
        total = counts.sum(dtype=np.float64)  # of hostile counts, which int64 might not hold
        if total * row_bytes != len(data):
            raise UnusableEventError(f"{len(data)} bytes for {total:.0f} rows of {name} of {row_bytes} bytes each")
        self._starts, self._counts = starts, counts
        self._total = int(total)
        self._data = data.reshape(self._total, row_bytes)

    def put(self, place: AnyArray) -> None:
        """Write them to an array `[limit, ...]` of any type."""
        values = self._data != 0 if place.dtype == np.bool_ else self._data.view(place.dtype)
        for rows, mine in self._chunks(values.reshape(self._total, *place.shape[1:]), self._total):
            place[rows] = mine

    def put_records(self, whole: Sequence[Int64Array], without_hash: Sequence[Int64Array]) -> None:
        """Write them, canary records, to arrays `[limit, 4] int64`: as they are, and with KV hash 0."""
        for rows, values in self._chunks(self._data.copy().view(np.int64), _CHUNK_ROWS):
            for place in whole:
                place[rows] = values
            values[:, RECORD_KV_HASH] = 0
            for place in without_hash:
                place[rows] = values

    def _chunks(self, values: AnyArray, most: int) -> Iterator[tuple[slice | Int64Array, AnyArray]]:
        """Yield which rows come next and their values; where runs are long, run by run and at most `most` rows a time."""
        if self._total < _LONG_RUN * len(self._starts):
            yield runs_to_slots(self._starts, self._counts), values
            return
        at = 0
        for start, count in zip(self._starts.tolist(), self._counts.tolist(), strict=True):
            for row in range(start, start + count, most):
                end = min(row + most, start + count)
                yield slice(row, end), values[at : at + end - row]
                at += end - row


class KeyframeLoader:
    """Takes a keyframe's events, one after another, into a state. `loading`: a keyframe has begun and is not whole yet;
    `untouched`: the state is as it was made. Arrays that this build does not know are passed over, and so is what a
    replay without history checks has no use for. The records get the KV hash of `kv_hash_mode`.
    """

    def __init__(self, state: ReplayState, *, kv_hash_mode: KvHashMode) -> None:
        self.loading = False
        self.untouched = True
        self._state = state
        self._mode = kv_hash_mode
        self._places: dict[str, npt.NDArray[Any]] = {}
        self._records_of = {
            f"{name}.records": (tier, pool.group.halves[0]) for pool in state.pools for tier, name in tiers(pool)
        }

    def stop(self) -> None:
        """Give up on a keyframe that has a gap in it."""
        self.loading = False

    def apply(self, view: EventView) -> None:
        """Take a keyframe event; raise `UnusableEventError` where it does not fit the header or itself."""
        match view.scalar("status"):
            case schema.KEYFRAME_BEGIN:
                self._begin(view)
            case _ if not self.loading:
                return
            case schema.KEYFRAME_REQUEST:
                self._state.request_table.learn(view)
            case schema.KEYFRAME_PART:
                self._part(view)
            case schema.KEYFRAME_FORWARD:
                self._waiting(view)
            case schema.KEYFRAME_END:
                self._end()

    def apply_requests(self, batch: TraceBatch, at: int) -> int:
        """Take events that name requests, from row `at` of a batch on; return the row of the first that was not taken.
        The last of them is left to `apply`, and so is every event of a batch in which some carry changes of tables.
        """
        status = batch.strings("status")
        stop = at
        while stop < batch.num_events and status[stop] == schema.KEYFRAME_REQUEST and batch.kinds[stop] == "keyframe":
            stop += 1
        if stop - at < 2 or any(len(batch.values(name)) for name in schema.TABLE_CHANGES):
            return at
        self._state.request_table.learn_rows(batch, at, stop - 1)
        return stop - 1

    def _begin(self, view: EventView) -> None:
        state = self._state
        try:
            labels = msgspec.json.decode(view.scalar("labels"), type=KeyframeLabels)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UnusableEventError(f"its labels are no keyframe's ({error})") from None
        activity, history = state.activity, state.history
        if len(labels.ran) != len(activity.ran) or len(labels.any_unknown) != len(state.pools):
            raise UnusableEventError("its labels speak of other runners or groups than the header")
        self._clear(labels.truth_fill)
        activity.ran, activity.decoded, activity.since_sweep = labels.ran, labels.decoded, labels.since_sweep
        for pool, unknown in zip(state.pools, labels.any_unknown, strict=True):
            pool.any_unknown = unknown
        if history is not None:
            history.last_forward, history.had_gap = labels.last_forward, labels.had_gap
            history.ledger.from_start = labels.from_start
        self._places = places(state, self._mode)
        self.loading = True

    def _clear(self, truth_fill: int) -> None:
        """Bring the state to that of a replay which has not begun."""
        state, history, tables = self._state, self._state.history, self._state.tables
        if not self.untouched:
            tables.req_to_token = [np.zeros(table.shape, np.int32) for table in tables.req_to_token]
            tables.luts = [np.zeros(len(lut), np.int64) for lut in tables.luts]
            if tables.truth is not None:
                tables.truth = np.zeros(tables.truth.shape, np.int32)
            if history is not None:
                history.forget()
            for tier in (tier for pool in state.pools for tier in (pool.pool, pool.host)):
                for array in tier.arrays():  # in place, since the KV sources are views of them
                    flat = array.reshape(-1).view(np.uint8)
                    for chunk in np.split(flat, range(1 << 20, len(flat), 1 << 20)):
                        if chunk.any():  # memory that nobody touched stays untouched
                            chunk[:] = 0
        if tables.truth is not None and truth_fill:
            tables.truth.fill(truth_fill)
        self.untouched = False

    def _part(self, view: EventView) -> None:
        name = view.scalar("note")
        if len(view.ints("state_start")) != len(view.ints("state_count")):
            raise UnusableEventError("state_start and state_count differ in length")
        if name in ("ended", "dropped"):
            self._list(name, view.bytes("state_bytes"))
        elif name in self._records_of:  # those of a tier's first half's TAIL, and the others that are like it
            tier, first = self._records_of[name]
            rows = KeyframeRows(view, name, limit=len(tier.writers), row_bytes=8 * WORDS)
            hashed = [first] if self._mode is not KvHashMode.NONE else []
            others = [*(records for half, records in tier.tail.items() if half not in hashed), *tier.head.values()]
            rows.put_records(
                [record_words(tier.tail[half], written=True) for half in hashed],
                [record_words(records, written=True) for records in others],
            )
        elif name in self._places:
            place = self._places[name]
            row_bytes = place.dtype.itemsize * int(np.prod(place.shape[1:], dtype=np.int64))
            rows = KeyframeRows(view, name, limit=len(place), row_bytes=row_bytes)
            kind = name.split(".")[2] if name.count(".") > 1 else ""
            if self._mode is KvHashMode.NONE and kind == "tail":
                rows.put_records([], [place])
            elif self._mode is not KvHashMode.NONE or kind not in ("hashes", "whole_hashes"):
                rows.put(place)

    def _list(self, name: str, data: ByteArray) -> None:
        width = 2 if name == "ended" else 5
        if len(data) % (8 * width):
            raise UnusableEventError(f"{name} has {len(data)} bytes, expected {width} int64 for each entry")
        rows, history = data.copy().view(np.int64).reshape(-1, width), self._state.history
        if history is None:
            return
        if name == "ended":
            history.ended.update(zip(*rows.T.tolist(), strict=True))
            return
        sizes = np.array([len(ledger) for ledger in history.ledger.rows], np.int64)
        known = (rows[:, 1] >= 0) & (rows[:, 1] < len(sizes))
        if not known.all() or bool(((rows[:, 2] < 0) | (rows[:, 2] >= sizes[rows[:, 1]])).any()):
            raise UnusableEventError("dropped names a slot that there is not")
        history.dropped.put_back(rows)

    def _waiting(self, view: EventView) -> None:
        """Take a forward over, of whose slots the first table's alone are there."""
        header, told = self._state.header, view.ints("state_start")
        try:
            first = replace(header, groups=(), tables=header.tables[:1], truth_table=None, runners=header.runners[:1])
            forward = read_forward(view, first)
        except UnusableEventError as error:
            raise UnusableEventError(f"a forward that waits for its samples contradicts itself: {error}") from None
        if len(told) != 2:
            raise UnusableEventError("a forward that waits for its samples does not say which it was")
        if self._state.history is not None:
            forward = replace(forward, event=int(told[0]), time_ns=int(told[1]))
            self._state.history.samples.put_back(forward, told=bool(view.scalar("note")))

    def _end(self) -> None:
        history = self._state.history
        if history is not None:
            held_by = history.ledger.held_by
            for rows in history.ledger.rows:
                owners, counts = np.unique(rows[rows[:, STATE] == HELD, OWNER], return_counts=True)
                for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
                    held_by[owner] = held_by.get(owner, 0) + count
        self.loading = False
