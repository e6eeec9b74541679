"""Canonical names of slots: what a slot holds, said in a way that no allocation order, chunk or batch changes.

The name of a token at position p is the sum of one word for each token and position up to p, along the slots that were
really read. A healthy request's name at p so depends on its tokens only, wherever they lie and whoever computed them; a
slot that holds anything else has another name.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...kernels.ops.hash.reference import splitmix64_words
from ...recorder.capture.host_arrays import ragged_index

Names = npt.NDArray[np.uint64]

NEVER: Final = np.uint64(0)  # nobody wrote the slot in this trace
UNKNOWN: Final = np.uint64(1)  # received from another engine
PADDED: Final = np.uint64(2)  # a padding token was written there
OUTSIDE: Final = np.uint64(3)  # the pool has no such slot
LOST: Final = np.uint64(4)  # written by what the trace lost, or after reading what it lost: it may be anything
ROOT: Final = np.uint64(0x6B76_0000_0001)  # before the first token

_SHIFT: Final = np.uint64(32)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


def token_words(tokens: Int64Array, positions: Int64Array) -> Names:
    """Return the word of each token at its position, `[n]`."""
    return splitmix64_words((tokens.astype(np.uint64) << _SHIFT) + positions.astype(np.uint64) + _ODD)


def weights(positions: Int64Array) -> Names:
    """Return an odd factor for each position, so that two entries of a table cannot change places unseen."""
    return (positions.astype(np.uint64) * np.uint64(2) + np.uint64(1)) * _ODD


def through(lut: Int64Array | None, slots: Int64Array, outside: int) -> Int64Array:
    """Return slots behind a full-to-SWA table, if there is one; `outside` for those that it does not have."""
    if lut is None:
        return slots
    return np.where((slots >= 0) & (slots < len(lut)), lut[np.clip(slots, 0, len(lut) - 1)], outside)


class Reading(NamedTuple):
    """What the requests of a forward read from a group, `bs` requests of `extend` tokens each, `T` in all.

    `names` `[T]`: of the tokens written. `reads` `[T]`: fingerprint of the content that each token sees before it;
    `misreads` `[T]`: the same of what was not the request's own, 0 where all was. `unsure` `[T] bool`: what it sees was lost,
    so that `reads` says nothing. `wrong` `[bs]`: the first position read that was not the request's own, -1 if there is
    none; `wrong_slot` `[bs]`.
    """

    names: Names
    reads: Names
    misreads: Names
    unsure: npt.NDArray[np.bool_]
    wrong: Int64Array
    wrong_slot: Int64Array


class SlotNames:
    """The names of one pool group's slots, who wrote them, and of each block-table row what it should lead to.

    `own[row, p]` is the name of position p by the request's own tokens; `own_len[row]` positions of it are known.
    """

    def __init__(self, num_slots: int, host_slots: int, rows: int, width: int) -> None:
        self.tiers = [np.zeros(max(1, size), np.uint64) for size in (num_slots, host_slots)]
        self.names = self.tiers[0]
        # request and position of whoever wrote a slot last, -1 nobody; and the number of the identity that it had, -1 unknown
        self.writers = [np.full((max(1, size), 3), -1, np.int64) for size in (num_slots, host_slots)]
        self.own = np.zeros((rows, width), np.uint64)
        self.own_len = np.zeros(rows, np.int64)
        self.own_request = np.full(rows, -1, np.int64)
        self.assumed = 0
        self._now = np.zeros(max(1, num_slots), np.bool_)

    def read(
        self,
        rows: Int64Array,
        ids: Int64Array,
        prefix: Int64Array,
        extend: Int64Array,
        words: Names,
        *,
        table: npt.NDArray[np.int32],
        lut: Int64Array | None,
        window: int,
        upto: Int64Array | None,
        written: Int64Array | None,
    ) -> Reading:
        """Follow the block table `table`, as the forward sees it, for `[bs]` rows within it, and their requests `ids`.

        `prefix` `[bs]` is within the table's width, `extend` `[bs]`; `words` `[T]` of the tokens fed; `lut` is the
        full-to-SWA table, if slots go through one; `window` the positions that are read before a token, 0 for all. What
        lies from `upto` `[bs]` on is left out of the fingerprints, None for nothing; `written` `[T]` are the slots that
        the forward writes before it reads, None if it reads first.
        """
        low = np.maximum(0, prefix - window) if window else np.zeros_like(prefix)
        length = prefix - low + extend
        begin = np.cumsum(length) - length
        request = np.repeat(np.arange(len(rows)), length)
        position = ragged_index(low, length)
        cached = position < prefix[request]
        row_of, at = rows[request][cached], position[cached]
        slots = through(lut, table[row_of, at].astype(np.int64), -1)
        own, known = self.own[row_of, at], self.own_len[row_of] > at
        found = self._look_up(slots, ids[request][cached], at, own, known)
        seen = np.zeros(len(position), np.uint64)
        seen[cached] = found
        # A request's own tokens follow what it reads right before them.
        last = begin + (prefix - low) - 1
        seed = np.where(prefix > 0, seen[np.maximum(last, 0)], ROOT)
        first = np.cumsum(extend) - extend
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)])
        names = sums[1:] + np.repeat(seed - sums[first], extend)
        names[np.repeat(seed == LOST, extend)] = LOST
        seen[~cached] = names
        foreign = np.zeros(len(position), np.bool_)
        if written is not None:
            found = self._overwritten(found, own, slots, written, names)
            seen[cached] = found
        foreign[cached] = known & (found != own) & (own != LOST)
        if upto is not None:
            inside = position < upto[request]
            seen, foreign = np.where(inside, seen, np.uint64(0)), foreign & inside
        weighted = seen * weights(position)
        token_at = np.repeat(begin + prefix - low, extend) + ragged_index(np.zeros_like(extend), extend)
        start = np.repeat(begin, extend)
        if window:
            start = np.maximum(start, token_at - window)
        wrong, wrong_slot = np.full((2, len(rows)), -1, np.int64)
        misreads = np.zeros(len(words), np.uint64)
        if foreign.any():
            misreads = _between(np.where(foreign, weighted, np.uint64(0)), start, token_at)
            which = np.flatnonzero(foreign[cached])[::-1]  # backwards: the first one stays
            wrong[request[cached][which]] = at[which]
            wrong_slot[request[cached][which]] = slots[which]
        lost = seen == LOST
        unsure = _between(lost.astype(np.uint64), start, token_at) > 0 if lost.any() else np.zeros(len(words), np.bool_)
        reads = _between(weighted, start, token_at)
        return Reading(names, reads, misreads, unsure, wrong, wrong_slot)

    def write(
        self, slots: Int64Array, names: Names, ids: Int64Array, positions: Int64Array, identities: Int64Array
    ) -> None:
        """Take what was written, `[n]` each; slots that the pool does not have, and slot 0, are passed over."""
        inside = (slots > 0) & (slots < len(self.names))
        self.names[slots[inside]] = names[inside]
        nobody = names[inside] == LOST
        for column, values in enumerate((ids, positions, identities)):
            self.writers[0][slots[inside], column] = np.where(nobody, -1, values[inside])

    def spoil(self, slots: Int64Array, name: np.uint64) -> None:
        """Give slots a name that says what became of them, with no writer."""
        slots = slots[(slots > 0) & (slots < len(self.names))]
        self.names[slots] = name
        self.writers[0][slots] = -1

    def receive(self, slots: Int64Array, request_id: int, start: int) -> None:
        """Take what another engine sent: right for that request and those positions, wrong for all others."""
        inside = np.flatnonzero((slots > 0) & (slots < len(self.names)))
        self.names[slots[inside]] = UNKNOWN
        self.writers[0][slots[inside], 0] = request_id
        self.writers[0][slots[inside], 1] = start + inside
        self.writers[0][slots[inside], 2] = -1

    def copy(self, src_tier: int, src: Int64Array, dst_tier: int, dst: Int64Array) -> None:
        """Copy whole slots between or within pool (tier 0) and host (tier 1)."""
        inside = (src >= 0) & (src < len(self.tiers[src_tier])) & (dst >= 0) & (dst < len(self.tiers[dst_tier]))
        src, dst = src[inside], dst[inside]
        self.tiers[dst_tier][dst] = self.tiers[src_tier][src]
        self.writers[dst_tier][dst] = self.writers[src_tier][src]

    def forget(self) -> None:
        """After a loss: any slot may hold anything, and any row belong to anybody."""
        for names, writers in zip(self.tiers, self.writers, strict=True):
            names.fill(LOST)
            writers.fill(-1)
        self.own_len.fill(0)
        self.own_request.fill(-1)

    def admit(self, row: int, request_id: int) -> None:
        """Let a row begin anew where another request has it now."""
        if self.own_request[row] != request_id:
            self.own_request[row] = request_id
            self.own_len[row] = 0

    def expect(self, row: int, tokens: Int64Array, upto: int) -> None:
        """Name a row's positions up to `upto`, not yet known, by the request's own tokens `tokens[p]`."""
        done = int(self.own_len[row])
        end = min(upto, len(tokens), self.own.shape[1])
        if end <= done:
            return
        base = self.own[row, done - 1] if done else ROOT
        if base == LOST:
            self.own[row, done:end] = LOST
        else:
            more = token_words(tokens[done:end], np.arange(done, end, dtype=np.int64))
            self.own[row, done:end] = base + np.cumsum(more, dtype=np.uint64)
        self.own_len[row] = end

    def trust(self, row: int, slots: Int64Array, start: int) -> None:
        """Take what slots hold for what a row's positions from `start` on should: nobody knows its tokens."""
        inside = np.clip(slots, 0, len(self.names) - 1)
        end = min(start + len(slots), self.own.shape[1])
        self.own[row, start:end] = self.names[inside][: end - start]
        self.own_len[row] = end

    def wrote(self, rows: Int64Array, prefix: Int64Array, extend: Int64Array, names: Names) -> None:
        """A forward is over: what it wrote is what its rows' positions should lead to."""
        at = ragged_index(prefix, extend)
        inside = at < self.own.shape[1]
        self.own[np.repeat(rows, extend)[inside], at[inside]] = names[inside]
        self.own_len[rows] = np.minimum(prefix + extend, self.own.shape[1])

    def _overwritten(self, found: Names, own: Names, slots: Int64Array, written: Int64Array, names: Names) -> Names:
        """Return what stands in slots read once this very forward has written: another request's token, where it is wrong."""
        inside = (written > 0) & (written < len(self.names))
        safe = np.clip(slots, 0, len(self.names) - 1)
        self._now[written[inside]] = True
        hit = self._now[safe]
        self._now[written[inside]] = False
        if not hit.any():
            return found
        latest = self.names.copy()
        latest[written[inside]] = names[inside]
        return np.where(hit & (found == own), latest[safe], found)

    def _look_up(
        self, slots: Int64Array, ids: Int64Array, at: Int64Array, own: Names, known: npt.NDArray[np.bool_]
    ) -> Names:
        inside = (slots >= 0) & (slots < len(self.names))
        safe = np.where(inside, slots, 0)
        found = np.where(inside, self.names[safe], OUTSIDE)
        lost = (found == UNKNOWN) | (found == LOST)
        if lost.any():
            # What was lost is taken for right; what was received, for the request and position that it was sent for.
            writer = self.writers[0][safe]
            fits = lost & known & ((writer[:, 0] == -1) | ((writer[:, 0] == ids) & (writer[:, 1] == at)))
            found = np.where(fits, own, found)
            kept = fits & (safe > 0)  # slot 0 stands for a table's entry that was lost, whatever it was
            self.names[safe[kept]] = own[kept]
            self.assumed += int((fits & (own != LOST)).sum())
        return found


def _between(values: Names, start: Int64Array, end: Int64Array) -> Names:
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    return sums[end] - sums[start]
