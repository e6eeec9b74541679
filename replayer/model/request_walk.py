"""One request followed through a trace: which slots its forwards read and wrote, and what was in them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array, record_words
from ...kernels.constants import UNKNOWN_TOKEN
from ...recorder.errors import TraceError
from ...recorder.state.apply import WriteStep
from ...recorder.state.forward import Forward, add_up
from ...recorder.state.pools import GroupPool
from ...recorder.trace.batch import EventView, TraceBatch
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import TraceGap, TraceReader
from ...recorder.trace.schema import LOGPROB_BITS
from ..run.streams import Checks, SegmentStream
from .late_bytes import LateBytes

_MOST_WAITING_BYTES: Final = 1 << 25  # of batches whose events wait, in their file


class Seen(NamedTuple):
    """Slots of a request that a forward read for the first time so, or wrote: all `[n]`, `data` by stream `[n, width]`.

    `changed` says by stream whose bytes are others than when the request last read or wrote them, without a write. `writers` `[n, 3]` are event, forward and request id of who wrote each slot last, `records` `[n, 2]` token and position there.
    """

    event: int
    forward: int
    wrote: bool
    group: int
    positions: Int64Array
    slots: Int64Array
    writers: Int64Array
    records: Int64Array
    data: list[ByteArray]
    changed: list[BoolArray]


class SampledLogprob(NamedTuple):
    """What the engine said of a token that it sampled for `position`; `before` are those of the same forward before it.

    `event` and `forward` are those of the forward, `kind` indexes `LOGPROB_KINDS`.
    """

    event: int
    forward: int
    position: int
    token: int
    before: tuple[int, ...]
    logprob: float
    kind: int


class _Held(NamedTuple):
    """What a request was last seen to have at each position, in one group; `lent` if `data` is that of a `Seen`, not to be written to."""

    slots: Int64Array
    events: Int64Array
    data: list[ByteArray]
    lent: bool = False


class RequestWalk(LateBytes):
    """Follows one request of the target through a trace: what it read, what it wrote, and its tokens."""

    def __init__(self, header: TraceHeader, request: str) -> None:
        super().__init__(header)
        self.request = request
        # Ids that may be the request's, and events that wait until one of them comes: None is a gap.
        self._ids = {int(request)} if request.lstrip("-").isdecimal() else set[int]()
        self._waiting: list[tuple[TraceReader | None, EventView] | None] = []
        self._waiting_bytes = 0
        self._follow(-1, named=False)

    def _follow(self, request_id: int, *, named: bool) -> None:
        self.request_id, self._named = request_id, named
        self.seen: list[Seen] = []
        self.fed: dict[int, int] = {}
        # Event, forward, position, and the position that was fed.
        self.wrong_inputs: list[tuple[int, int, int, int]] = []
        self.truth = np.empty(0, np.int64)
        self.forwards = 0
        self._held: dict[int, _Held] = {}
        self.logprobs: list[SampledLogprob] = []
        # By event of a verify forward: where it begins, and what it was fed.
        self._drafts: dict[int, tuple[int, Int64Array]] = {}
        self._samples_at: dict[int, tuple[int, int, int]] = {}  # by forward: event, place in its batch, next position

    def walk(self, paths: Sequence[Path], checks: Checks | None = None) -> None:
        """Read a trace to its end; raise `TraceError` if nobody of that name ran in it, or two did.

        With `checks` what others wrote stays in the files, and is checked meanwhile. Events are applied once the request comes again: those
        behind its last are not.
        """
        stream = SegmentStream(paths)
        for item in stream.stream() if checks is None else stream.stream_without_bytes(checks):
            if isinstance(item, TraceGap):
                self._waiting.append(None)
                continue
            while checks is not None and (oldest := checks.oldest()) is not None:
                self._catch_up()
                self.leave(oldest)
                checks.close(oldest)
            self._waiting_bytes += _held_bytes(item)
            reader, mine = checks.reader if checks is not None else None, self._concerns(item)
            for view in item:
                self._waiting.append((reader, view))
                if mine[view.index] or (view.kind == "sample" and int(view.scalar("forward")) in self._samples_at):
                    self._catch_up()
            if self._waiting_bytes > _MOST_WAITING_BYTES:
                self._catch_up()
        if not self.forwards:
            raise TraceError(
                f"{paths[0]}: no forward of a request {self.request}; kvcanary sql names those that there are"
            )

    def _concerns(self, batch: TraceBatch) -> BoolArray:
        """Return which events of a batch may be about the request, `[num_events]`: those that name one, and its forwards."""
        kinds = np.array(batch.kinds)
        naming = (kinds == "request") | (kinds == "keyframe")
        if naming.any():
            named = np.array([name == self.request for name in batch.strings("name")], np.bool_)
            self._ids |= set(batch.scalar_ints("request_id")[named].tolist())
            naming &= named | (kinds == "keyframe")
        ids, ends = batch.values("request_ids"), batch.offsets("request_ids")
        mine = np.append(0, np.cumsum(np.isin(ids, list(self._ids))))[ends]
        return naming | ((kinds == "forward") & (np.diff(mine) > 0))

    def _catch_up(self) -> None:
        """Apply the events that wait."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for one in waiting:
            if one is None:
                self.forget()
                continue
            reader, view = one
            self.reads(reader)
            self.at(view)
            self.apply(view)
            if view.kind in ("forward", "sample"):
                self._sampled(view)

    def _store_bytes(self, steps: list[WriteStep], forward: Forward) -> None:
        mine = [r for r in range(len(forward.request_ids)) if self._is_mine(forward, r)] if forward.runner == 0 else []
        for step in steps if mine else ():
            self._read(step.pool, forward, mine[-1])
        super()._store_bytes(steps, forward)
        for step in steps if mine else ():
            self._wrote(step, forward, mine[-1])
        if mine:
            self._inputs(forward, mine[-1], steps[0].write_plan.offsets)
            self.forwards += 1

    def _sampled(self, view: EventView) -> None:
        place, bits = self._samples_at.get(int(view.scalar("forward"))), view.ints("sampled_logprobs")
        lens, tokens = view.ints("sampled_lens"), view.ints("sampled_tokens")
        if place is None or not len(bits) or len(bits) != len(tokens) or not add_up(lens, len(tokens)):
            return
        event, r, position = place
        begin, end = np.cumsum(np.append(0, lens))[r : r + 2].tolist() if r < len(lens) else (0, 0)
        values = (bits & (1 << LOGPROB_BITS) - 1).astype(np.uint32).view(np.float32)
        for at in range(begin, end):
            before = tuple(tokens[begin:at].tolist())
            said = int(tokens[at]), before, float(values[at]), int(bits[at]) >> LOGPROB_BITS
            self.logprobs.append(SampledLogprob(event, int(view.scalar("forward")), position + at - begin, *said))

    def _is_mine(self, forward: Forward, r: int) -> bool:
        request = int(forward.request_ids[r])
        if forward.req_pool_indices[r] == 0 or request == -1:  # padding, and requests that nobody knows
            return False
        if request == self.request_id:
            return True
        known = self.state.request_table.facts.get(request)
        named = known is not None and known.name == self.request
        if named and self._named:
            both = f"requests {self.request_id} and {request} are both named {self.request}"
            raise TraceError(f"{both}; name one by its number")
        if named or (self.request_id == -1 and str(request) == self.request):
            self._follow(request, named=named)  # a name goes before a number: an engine's names may be numbers
            return True
        return False

    def _read(self, pool: GroupPool, forward: Forward, r: int) -> None:
        """Take note of what is other than it was when this request last had it."""
        group, row, prefix = pool.group, int(forward.req_pool_indices[r]), int(forward.prefix_lens[r])
        first = max(0, prefix - group.window) if group.window else 0
        slots = self.tables.req_to_token[group.table][row, first:prefix].astype(np.int64)
        if group.lut >= 0:
            lut = self.tables.luts[group.lut]
            slots = np.where((slots >= 0) & (slots < len(lut)), lut[np.clip(slots, 0, len(lut) - 1)], 0)
        positions = np.arange(first, first + len(slots))
        inside = (slots > 0) & (slots < pool.num_slots)
        inside[inside] &= ~pool.pool.unknown[slots[inside]]
        self._note(pool, forward, r, positions[inside], slots[inside], wrote=False)

    def _wrote(self, step: WriteStep, forward: Forward, r: int) -> None:
        begin, end = step.write_plan.offsets[r : r + 2].tolist()
        slots = step.slots[begin:end]
        positions = int(forward.prefix_lens[r]) + np.arange(end - begin)
        inside = (slots > 0) & (slots < step.pool.num_slots) & (positions < self._width(step.pool))
        self._note(step.pool, forward, r, positions[inside], slots[inside], wrote=True)

    def _width(self, pool: GroupPool) -> int:
        return self.header.tables[pool.group.table].width

    def _note(
        self, pool: GroupPool, forward: Forward, r: int, positions: Int64Array, slots: Int64Array, *, wrote: bool
    ) -> None:
        if not len(positions):
            return
        if not wrote:  # all of it will be read again
            self.fetch(pool, slots)
        writers, data = pool.last_writers(slots), self.copies(pool, slots)
        if wrote:
            writers[:] = forward.event, forward.forward, forward.request_ids[r]
        new = np.ones(len(slots), np.bool_)
        changed = [np.zeros(len(slots), np.bool_) for _ in data]
        if pool.index not in self._held and np.array_equal(positions, np.arange(len(slots))):
            self._held[pool.index] = _Held(slots.copy(), writers[:, 0].copy(), data, lent=True)
        else:
            held = self._room(pool, int(positions.max()) + 1)
            if not wrote:
                new = (held.slots[positions] != slots) | (held.events[positions] != writers[:, 0])
                same = np.flatnonzero(~new)
                for one, have, now in zip(changed, held.data, data, strict=True):
                    differs = (have[positions[same]] != now[same]).any(axis=1)
                    one[same] = differs & now[same].any(axis=1)  # zeros: nobody knows
                new = np.logical_or.reduce([new, *changed])
            held.slots[positions], held.events[positions] = slots, writers[:, 0]
            for have, now in zip(held.data, data, strict=True):
                have[positions] = now
        if new.any():
            records = record_words(pool.pool.tail[pool.group.halves[0]], written=False)[slots[new]][:, :2].copy()
            parts = [now if new.all() else now[new] for now in data], [one[new] for one in changed]
            place = positions[new], slots[new], writers[new], records, *parts
            self.seen.append(Seen(forward.event, forward.forward, wrote, pool.index, *place))

    def _room(self, pool: GroupPool, size: int) -> _Held:
        held = self._held.get(pool.index)
        if held is None or held.lent or len(held.slots) < size:
            more = 2 * max(size, 0 if held is None else len(held.slots))
            new = _Held(
                np.zeros(more, np.int64),
                np.full(more, -2),
                [np.zeros((more, kv.shape[1]), np.uint8) for kv in pool.pool.kv],
            )
            if held is not None:
                count = len(held.slots)
                new.slots[:count], new.events[:count] = held.slots, held.events
                for have, take in zip(held.data, new.data, strict=True):
                    take[:count] = have
            held = self._held[pool.index] = new
        return held

    def _inputs(self, forward: Forward, r: int, offsets: Int64Array) -> None:
        begin, end = offsets[r : r + 2].tolist()
        prefix = int(forward.prefix_lens[r])
        self.fed.update(zip(range(prefix, prefix + end - begin), forward.input_ids[begin:end].tolist(), strict=True))
        # What a verify forward accepts follows its first token.
        verifies = forward.mode == "target_verify"
        follows = 1 if verifies else end - begin
        if verifies:
            self._drafts[forward.event] = prefix, forward.input_ids[begin:end].copy()
        self._samples_at[forward.forward] = forward.event, r, prefix + follows
        fed = forward.positions[begin:end]
        for at in np.flatnonzero(fed != prefix + np.arange(end - begin))[:1].tolist():
            self.wrong_inputs.append((forward.event, forward.forward, prefix + at, int(fed[at])))
        if self.tables.truth is not None and forward.truth_lens is not None:
            known = self.tables.truth[int(forward.req_pool_indices[r]), : int(forward.truth_lens[r])].astype(np.int64)
            self.truth = known if len(known) >= len(self.truth) else self.truth

    def leave_out_rejected(self, tokens: Int64Array) -> None:
        """Forget what verify forwards wrote for drafts that the request, of `tokens` `[n]`, has not got, and behind them."""
        for at, seen in enumerate(self.seen):
            prefix, fed = self._drafts.get(seen.event, (0, tokens[:0])) if seen.wrote else (0, tokens[:0])
            got = tokens[prefix : prefix + len(fed)]
            rejected = np.flatnonzero(fed[: len(got)] != got)
            rejected = rejected[rejected > 0]  # the first is no draft
            if len(rejected):
                kept = seen.positions < prefix + int(rejected[0])
                self.seen[at] = seen._replace(
                    positions=seen.positions[kept],
                    slots=seen.slots[kept],
                    writers=seen.writers[kept],
                    records=seen.records[kept],
                    data=[one[kept] for one in seen.data],
                    changed=[one[kept] for one in seen.changed],
                )

    def starts(self, size: int) -> Int64Array:
        """Return where the chunks begin in which a request's first `size` positions were computed, 0 first."""
        events = np.full(size, -1, np.int64)
        for seen in reversed(self.seen):  # the first sight of each
            if seen.group == self.seen[0].group:
                inside = seen.positions < size
                events[seen.positions[inside]] = seen.writers[inside, 0]
        return np.append(0, np.flatnonzero(np.diff(events)) + 1)

    def tokens(self) -> Int64Array:
        """Return the request's tokens as far as its KV went: what its scheduler said, else what was fed."""
        size = min(max(self.fed, default=-1) + 1, self.header.tables[0].width)
        tokens = np.full(size, UNKNOWN_TOKEN, np.int64)
        for position, token in self.fed.items():
            if position < size:
                tokens[position] = token
        known = min(size, len(self.truth))
        tokens[:known] = np.where(self.truth[:known] >= 0, self.truth[:known], tokens[:known])
        unknown = np.flatnonzero(tokens < 0)
        return tokens[: int(unknown[0])] if len(unknown) else tokens


def _held_bytes(batch: TraceBatch) -> int:
    """Return what a batch takes in its file, without bytes that were left there."""
    held = 0 if batch.buffer_bytes is None else int(batch.buffer_bytes.sum())
    return held - (len(batch.values("kv_bytes")) if batch.unread_at >= 0 else 0)
