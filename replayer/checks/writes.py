"""Bytes that a forward leaves and that are not the token's: another token's, or others than the model handed over."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array, record_words
from ...kernels.constants import RECORD_POSITION, RECORD_TOKEN, UNKNOWN_TOKEN
from ...kernels.ops.token_rows.encoding import ITEM_BYTES
from ...recorder.state.writes import stays
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import KvStream
from ...recorder.trace.reader import EventView
from ..model.written import EVENT, SLOT, WrittenTokens, forward_tokens, written_tokens
from ..report.findings import NO_CAUSE, Cause, Finding
from .check import Covered, Explained, HistoryCheck, register
from .history import ForwardView, GroupReads, History
from .layers import looked_at

# Bytes that so many tokens have, in such a share of slots, of which there are as many at least and are looked at at most, tell none
# from another: of slots that writes changed, or, where one row of bytes is in most, of all, since writes then change next to none.
_MANY_TOKENS: Final = 3
_MANY_SHARE: Final = 0.1
_MOST_SHARE: Final = 0.5
_FEW_SLOTS: Final = 32
_MOST_SLOTS: Final = 1 << 16
# Where so many of the numbers that were written are those of the token before, tokens differ by less than others can tell.
_SAME_NUMBERS: Final = 0.25


@register
class WriteLost(HistoryCheck):
    """A forward wrote a token into a slot, and the slot's KV bytes are still those of another token.

    A kernel that skips a token shows here and nowhere else: the stale bytes are recorded as those written, and record and
    bytes agree from then on. The same token written again leaves the same bytes, since the first layer's V depends on
    nothing else; and so do tokens that have one embedding (rows of a vocabulary that were never trained, or random weights
    that each rank draws alike): bytes that the token has in another slot, or is written with to another in the same batch
    of events, are its own, unless they stood in that slot before it, too. Not judged: a group in which many tokens have the same
    bytes, or one row of bytes is in most slots, which tell none from another then (of random weights V may be little but its
    bias); K that stayed where V changed in few of its numbers, and the other way round, nor where bytes are hashed if V
    changed at all; samples of other layers alone in types of fewer bits than float32, in which some tokens are all but the
    same (of little but what a few large values make of them); unknown tokens (-1), slots of zeros (of 8-bit floats of -0, too),
    slots that nobody has written in this trace.
    """

    kind = "write_lost"
    finds = "a forward wrote a token, and the slot's bytes are still those of another one"
    covered = Covered.COMPILED
    events = frozenset({"keyframe"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        # What forwards of a batch wrote, by runner and stream.
        self._written: tuple[TraceBatch | None, dict[tuple[int, int], WrittenTokens | None]] = None, {}
        # By group the event + 1 of each slot's last write that changed nothing, which is no witness; and all those of the batch.
        self._left: dict[int, Int64Array] = {}
        self._left_now: set[tuple[int, int, int]] = set()
        self._telling = (-1, -1), False  # of which event and group it was asked last, and what was said

    def event(self, view: EventView) -> list[Finding]:
        """Forget which writes changed nothing, which no keyframe holds."""
        self._left.clear()
        return []

    def forget(self) -> None:
        super().forget()
        self._left.clear()

    def batch(self, batch: TraceBatch) -> None:
        self._left_now.clear()

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        streams = self.history.header.streams(view.forward.runner)
        for group in () if view.forward.failed else view.groups:
            left = [view.forward.kv_bytes[n] for n, (index, _) in enumerate(streams) if index == group.pool.index]
            own = [stream for index, stream in streams if index == group.pool.index]
            if left:
                yield from self._lost(view, group, left, own)

    def _lost(
        self, view: ForwardView, group: GroupReads, left: list[ByteArray], streams: list[KvStream]
    ) -> list[Finding]:
        forward, pool, slots = view.forward, group.pool.pool, group.request_slots
        known = (slots > 0) & (slots < group.pool.num_slots)
        at = np.where(known, slots, 0)
        known &= (pool.writers[at, 0] > 0) & ~pool.unknown[at]
        tokens = record_words(pool.tail[group.pool.group.halves[0]], written=False)[at, RECORD_TOKEN]
        fed = forward.input_ids[: len(slots)]
        other = np.flatnonzero(known & (tokens != fed) & (tokens != UNKNOWN_TOKEN) & (fed != UNKNOWN_TOKEN))
        if not len(other):
            return []
        stale = np.zeros((len(left), len(other)), np.bool_)
        hardly = np.zeros(len(other), np.bool_)
        hashed = self.history.header.tokens == "hashed"  # and so are the bytes: nobody knows how many numbers stayed
        # Samples of few bits tell of none by themselves: deep in a model some tokens are all but the same.
        sampled = np.array([bool(stream.samples) and stream.dtype != "float32" for stream in streams])
        for same, before, after, stream in zip(stale, pool.kv, left, streams, strict=True):
            rows = before[at[other]]
            filled = (rows & np.uint8(127 if stream.dtype.startswith("float8") else 255)).any(axis=1)  # not -0 alone
            same[:] = (rows == after[other]).all(axis=1) & filled
            hardly |= ~same & filled & (hashed or _hardly_changed(rows, after[other], stream))
        some = np.flatnonzero(stale[~sampled].any(axis=0))
        if len(some):
            kept = [
                n
                for n in some.tolist()
                if not (hardly[n] or self._is_its_own(view, group, left, stale[:, n], streams, int(other[n])))
            ]
            same_bytes = slots[other[some]]
            self._left.setdefault(group.pool.index, np.zeros(group.pool.num_slots, np.int64))[same_bytes] = (
                forward.event + 1
            )
            self._left_now |= {(group.pool.index, slot, forward.event) for slot in same_bytes.tolist()}
            some = np.array(kept, np.int64)
        lost = other[some]

        def explain(n: int) -> Explained:
            token, slot = int(lost[n]), int(slots[lost[n]])
            event, before = int(pool.writers[slot, 0]) - 1, int(tokens[token])
            detail = f"wrote token {fed[token]}, the bytes are still those of token {before}, written in event {event}"
            return detail, [event], Cause(token=before, expected_token=int(fed[token]))

        return self.of_tokens(view, group, explain, lost)

    def _is_its_own(
        self,
        view: ForwardView,
        group: GroupReads,
        left: list[ByteArray],
        stale: BoolArray,
        streams: list[KvStream],
        token: int,
    ) -> bool:
        """Say whether a token has in another slot the bytes that its slot kept: then it has the embedding of the token before it.

        What else its slot kept, K say, is its own then too if it stands where that token stood; samples say nothing of another slot's.
        """
        pool, slot, fed = group.pool.pool, int(group.request_slots[token]), int(view.forward.input_ids[token])
        records = record_words(pool.tail[group.pool.group.halves[0]], written=False)
        there = (pool.writers[:, 0] > 0) & ~pool.unknown
        there[[0, slot]] = False
        everywhere = np.flatnonzero(there)
        if (left_at := self._left.get(group.pool.index)) is not None:
            there &= left_at != pool.writers[:, 0]
        if self._tell_nothing(view, group, np.flatnonzero(there), everywhere, records[:, RECORD_TOKEN]):
            return True
        slots = np.flatnonzero(there & (records[:, RECORD_TOKEN] == fed))
        kept = [n for n in np.flatnonzero(stale).tolist() if not streams[n].samples]
        own = [
            n
            for n in kept
            if (pool.kv[n][slots] == left[n][token]).all(axis=1).any()
            or self._written_elsewhere(view, group, n, fed, slot, left[n][token])
        ]
        same_place = int(records[slot, RECORD_POSITION]) == int(view.forward.positions[token])
        return bool(own) and (same_place or len(own) == len(kept))

    def _tell_nothing(
        self, view: ForwardView, group: GroupReads, changed: Int64Array, everywhere: Int64Array, tokens: Int64Array
    ) -> bool:
        """Say whether bytes of a stream tell none of the `tokens` from another, of each slot one: many of them have the same in a
        good part of the slots `[n]` that writes `changed`, or one row of bytes is in most of all slots `[m]`.
        """
        asked = view.forward.event, group.pool.index
        if self._telling[0] != asked:
            said = False
            for slots, least, share in ((changed, 0.0, _MANY_SHARE), (everywhere, _MOST_SHARE, _MOST_SHARE)):
                chosen = slots[:_MOST_SLOTS]
                if len(chosen) >= _FEW_SLOTS and not said:
                    said = any(_alike(kv[chosen], tokens[chosen], least) >= share for kv in group.pool.pool.kv)
            self._telling = asked, said
        return self._telling[1]

    def _written_elsewhere(
        self, view: ForwardView, group: GroupReads, stream: int, fed: int, slot: int, row: ByteArray
    ) -> bool:
        """Say whether a forward of the same batch of events, earlier or later, wrote a token with these bytes to another slot
        which did not hold them before, as far as is known.
        """
        if group.pool.group.lut >= 0:  # which slots of this pool they were is known of this forward alone
            return False
        pool = group.pool.pool
        batch, runner, header = view.event.batch, view.forward.runner, self.history.header
        number = [n for n, (index, _) in enumerate(header.streams(runner)) if index == group.pool.index][stream]
        if self._written[0] is not batch:
            self._written = batch, {}
        known = self._written[1]
        if (runner, number) not in known:
            nobody = np.zeros_like
            table = group.pool.group.table
            given = forward_tokens(batch, header, runner, lambda ids, _: nobody(ids))
            known[runner, number] = None if given is None else written_tokens(given, header, runner, number, table)
        found = known[runner, number]
        if found is None:
            return False
        elsewhere = np.flatnonzero((found.keys == fed) & (found.places[:, SLOT] != slot))
        same = elsewhere[(found.data[elsewhere] == row).all(axis=1)]
        for event, other in found.places[same][:, [EVENT, SLOT]].tolist():
            if event < view.forward.event:
                changed = (group.pool.index, other, event) not in self._left_now
            else:
                changed = not 0 <= other < group.pool.num_slots or bool((pool.kv[stream][other] != row).any())
            if changed:
                return True
        return False


def _hardly_changed(before: ByteArray, after: ByteArray, stream: KvStream) -> BoolArray:
    """Say of each row of two `[n, bytes]` whether a good part of its numbers stayed; of numbers that are not known never."""
    size = ITEM_BYTES.get(stream.dtype, 0)
    if not size or before.shape[1] % size:
        return np.zeros(len(before), np.bool_)
    stayed = (before == after).reshape(len(before), -1, size).all(axis=2)
    return np.asarray(stayed.mean(axis=1) >= _SAME_NUMBERS)


def _alike(rows: ByteArray, tokens: Int64Array, least: float) -> float:
    """Return the share of rows `[n, bytes]`, other than zeros, that many different tokens `[n]` have, each `least` a share of all."""
    _, which = np.unique(rows.view(f"V{rows.shape[1]}").reshape(-1), return_inverse=True)
    each = np.unique(np.stack([which, tokens]), axis=1)[0]
    many = np.bincount(each, minlength=int(which.max()) + 1)[which] >= _MANY_TOKENS
    often = np.bincount(which)[which] >= least * len(rows)
    return float((many & often & rows.any(axis=1)).mean())


@register
class WriteDamaged(HistoryCheck):
    """A forward left other bytes in a slot than the model handed to the cache for the last token written to it.

    Damage done between the two is recorded as what was written, and so shows here and nowhere else. Streams whose submitted
    bytes the recording has not, which is all of them unless an adapter records them, are not judged.
    """

    kind = "write_damaged"
    finds = "a forward left other bytes in a slot than the model handed to the cache"
    covered = Covered.COMPILED  # which stops in front of a forward that has submitted bytes

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        for group in view.groups if view.forward.kv_submitted else ():
            yield from self._damaged(view, group)

    def _damaged(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, slots, pool = view.forward, group.request_slots, group.pool.pool
        judged = stays(group.written, group.pool.group)[: len(slots)]
        at = np.where((slots > 0) & (slots < group.pool.num_slots), slots, 0)
        known = (pool.writers[at, 0] > 0) & ~pool.unknown[at]
        # Of all that differs in a slot: whether it is what it held before, and whether that may be what the pool was made with.
        kept, empty = known.copy(), ~known
        first: dict[int, str] = {}
        streams = enumerate(self.history.header.streams(forward.runner))
        own = [(number, stream) for number, (index, stream) in streams if index == group.pool.index]
        for before, (number, stream) in zip(pool.kv, own, strict=True):
            stored, given = forward.kv_bytes[number][: len(slots)], forward.kv_submitted[number][: len(slots)]
            differ = (stored != given).any(axis=1)
            kept &= ~differ | (stored == before[at]).all(axis=1)
            empty &= ~differ | ~stored.any(axis=1)
            for token in np.flatnonzero(judged & differ).tolist():
                byte = int(np.argmax(stored[token] != given[token]))
                layer, place = stream.layer_of(byte), byte
                if stream.samples:
                    layer, begin = looked_at(stream, int(slots[token]), self.history.backend)
                    place += begin
                what = f"{stream.half} of layer {layer} holds {stored[token, byte]:#04x} in byte {place}"
                first.setdefault(token, f"{what}, the model handed in {given[token, byte]:#04x}")
        found = np.array(sorted(first), np.int64)

        def explain(n: int) -> Explained:
            token = int(found[n])
            as_before = ", as before the forward" if kept[token] else ""
            cause = Cause("as_before") if kept[token] else Cause("zeros") if empty[token] else NO_CAUSE
            return first[token] + as_before, [], cause

        return self.of_tokens(view, group, explain, found)
