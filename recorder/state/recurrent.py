"""What each slot of recurrent state holds: whose prefix, up to which position, and the hash of its bytes.

A request's prefix is known by a hash of its tokens and their positions. It is a sum, so that chunks may end anywhere.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.ops.hash.reference import splitmix64_words
from ..trace.header import TraceHeader
from ..trace.schema import RECURRENT_OPS
from .forward import Forward, batch_tokens

CLEAR, COPY, STEP, SAVE = range(len(RECURRENT_OPS))
# Columns of `Forward.recurrent`, the trace's.
POOL, OP, REQUEST, SOURCE, SLOT, BEFORE, AFTER = range(7)
# Columns of `slots[pool]`: the event that filled it + 1 (0: nothing is known), by which request, how many tokens are in the
# state (-1: it is padding's), the hash of these tokens and of the bytes (0: unknown).
STATE_EVENT, STATE_REQUEST, STATE_POSITION, STATE_CHAIN, STATE_HASH = range(5)
_CHAIN_REQUEST, _CHAIN_END, _CHAIN = range(3)
_NOTHING_READ: Final = 1  # the chain of no tokens
_NOBODYS: Final = -1  # how many tokens are in a state that is padding's

Truth = npt.NDArray[np.int32] | None


class Misread(NamedTuple):
    """A step of request `request` of a batch that read a state which is not its own: `cause` is a finding's, `state` `[5]`
    is the slot's row in `StateSlots.slots`.
    """

    pool: int
    request: int
    slot: int
    cause: str
    state: Int64Array


class StateSlots:
    """`slots[pool]` `[num_slots, 5] int64`; `chains` `[rows, 3] int64`: request, end and chain of a row's last forward; `cleared`
    `[pools, 2] int64`: the hash of the bytes of a slot that was zeroed (0: unknown), and whether a forward has left those, too.
    """

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self.slots = [np.zeros((pool.num_slots, 5), np.int64) for pool in header.states]
        rows = max([1, *(table.rows for table in header.tables)]) if header.states else 0
        self.chains = np.zeros((rows, 3), np.int64)
        self.cleared = np.zeros((len(header.states), 2), np.int64)
        self._applied: Forward | None = None
        self._misread: list[Misread] = []

    def forget(self) -> None:
        """Take everything for unknown."""
        self.slots = [np.zeros_like(slots) for slots in self.slots]  # untouched: there may be millions
        self.chains = np.zeros_like(self.chains)
        self._applied = None

    def apply(self, forward: Forward, truth: Truth) -> list[Misread]:
        """Move on by a forward, and return which of its requests read a state that is not theirs; the second time the same.

        `truth` are the tables' truth tokens, by which a prefix is known that the request has not computed itself.
        """
        if forward is self._applied or not self.slots:
            return self._misread
        self._applied, self._misread = forward, []
        if forward.recurrent is not None and len(forward.recurrent):
            self._apply(forward, truth)
        self._unseen(forward)
        return self._misread

    def _unseen(self, forward: Forward) -> None:
        """Take for unknown what a forward did to the pools of its runner whose slots nobody read."""
        ops = forward.recurrent
        stepped = set() if ops is None else set(ops[ops[:, OP] == STEP, POOL].tolist())
        if (forward.req_pool_indices > 0).any():
            for number, pool in enumerate(self._header.states):
                if pool.runner == forward.runner and number not in stepped:
                    self.slots[number] = np.zeros_like(self.slots[number])

    def _apply(self, forward: Forward, truth: Truth) -> None:
        assert forward.recurrent is not None
        before, after = self._chains(forward, truth)
        ends = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        written: dict[tuple[int, int], int] = {}
        # By pool and hash, of each request: the slot in which that was left.
        left: dict[tuple[int, int], dict[int, int]] = {}
        for pool, op, request, source, slot, old, new in forward.recurrent.tolist():
            slots = self.slots[pool]
            if op == CLEAR:
                slots[slot] = forward.event + 1, -1, 0, _NOTHING_READ, new
                self.cleared[pool, 0] = new or self.cleared[pool, 0]
            elif op == COPY:
                slots[slot] = self._held(pool, source)  # with the hash of what the source is to hold
            elif op == SAVE:
                slots[slot] = self._saved(forward, request, source, int(before[request]), new)
            else:
                state = self._held(pool, source)
                cause = "begun_anew" if slot >= 0 and forward.prefix_lens[request] > 0 else ""
                if source >= 0:
                    cause = self._judge(forward, truth, request, pool, state, int(before[request]), old)
                if (
                    not cause
                    and source >= 0
                    and not slots[source, STATE_EVENT]
                    and [old, 0] == self.cleared[pool].tolist()
                ):
                    # Nobody was seen to fill it, and its bytes say that nobody has; unless they stay what they are, or are
                    # those of a request that begins.
                    cause = "" if old in (0, new) or forward.prefix_lens[request] <= 0 else "cleared"
                if not cause and source == slot and slots[slot, STATE_HASH] == old == new != self.cleared[pool, 0]:
                    cause = "left_as_it_was" if new and _took_another_token(forward, truth, request) else ""
                self.cleared[pool, 1] |= not forward.failed and new != 0 and new == self.cleared[pool, 0]
                if written.setdefault((pool, slot), request) != request:
                    cause = "same_forward"
                if cause:
                    shown, row = (slot, slots[slot]) if cause == "same_forward" else (source, state)
                    if source < 0:
                        shown, row = slot, np.zeros_like(row)
                    self._misread.append(Misread(pool, request, shown, cause, row.copy()))
                request_id = int(forward.request_ids[request])
                slots[slot] = forward.event + 1, request_id, int(ends[request]), int(after[request]), new
                if slot >= 0:
                    left.setdefault((pool, new), {})[request] = slot
            if forward.failed:  # how far it came, nobody knows
                slots[slot] = 0
        if forward.mode != "target_verify" and not forward.failed:
            for (pool, found), of in left.items():
                if len(of) > 1 and self._header.states[pool].from_end:  # else its last token may not be among the bytes
                    self._misread += self._as_anothers(forward, pool, found, of)
        rows = forward.req_pool_indices
        inside = (rows > 0) & (rows < len(self.chains))
        self.chains[rows[inside]] = np.stack((forward.request_ids, ends, after), axis=1)[inside]

    def _as_anothers(self, forward: Forward, pool: int, found: int, left: dict[int, int]) -> list[Misread]:
        """Return the requests of a forward in whose slots it `left` the same bytes, though they end with different tokens.

        What a token of its own has brought into each is lost in one of them. Where states are seldom anything but the same,
        as of zeros, that says nothing: others must be seen that differ, and none that have these bytes, too.
        """
        hashes, nothing = self.slots[pool][:, STATE_HASH], (0, self.cleared[pool, 0], self._header.states[pool].zeros)
        others = np.setdiff1d(hashes, [found, *nothing])
        if found in nothing or len(others) < 2 or int((hashes == found).sum()) != len({*left.values()}):
            return []
        ends = np.cumsum(np.maximum(forward.extend_lens, 0))
        last = {r: int(forward.input_ids[int(ends[r]) - 1]) for r in left if 0 < ends[r] <= len(forward.input_ids)}
        if len(last) < len(left) or UNKNOWN_TOKEN in last.values() or len({*last.values()}) < len(left):
            return []
        requests = [*left]
        pairs = zip(requests, requests[1:] + requests[:1], strict=True)
        return [Misread(pool, r, left[r], "as_anothers", self.slots[pool][left[other]].copy()) for r, other in pairs]

    def _held(self, pool: int, slot: int) -> Int64Array:
        """Return a slot's row; of padding's one that says so."""
        padding = slot in self._header.states[pool].padding_slots
        return np.array((0, -1, _NOBODYS, 0, 0), np.int64) if padding else self.slots[pool][slot]

    def _saved(self, forward: Forward, request: int, position: int, chain: int, found: int) -> Int64Array | int:
        """Return a slot's row that holds a request's state behind its first `position` tokens, 0 for tokens that are not its
        forward's; `chain` is that of its prefix.
        """
        added = position - int(forward.prefix_lens[request])
        if not 0 < added <= int(forward.extend_lens[request]):
            return 0
        first = int(np.maximum(forward.extend_lens[:request], 0).sum())
        fed = forward.input_ids[first : first + added]
        if chain and (fed == UNKNOWN_TOKEN).any():
            chain = 0
        elif chain:
            words = (
                _words(fed, np.arange(position - added, position)).sum(dtype=np.uint64, keepdims=True).view(np.int64)
            )
            chain = int(_nonzero(words + chain)[0])
        return np.array((forward.event + 1, forward.request_ids[request], position, chain, found), np.int64)

    def _judge(
        self, forward: Forward, truth: Truth, request: int, pool: int, state: Int64Array, chain: int, found: int
    ) -> str:
        """Say by a finding's cause what is wrong with a state that a request reads, "" for nothing.

        Who has no prefix and reads one all the same is to find a slot that was zeroed, which engines do unseen: there it must be
        seen by the bytes that another's state is still there.
        """
        event, writer, position, theirs, wrote = state.tolist()
        zeros = self._header.states[pool].zeros
        if forward.prefix_lens[request] <= 0 and found != wrote and found and zeros:
            return "not_zeroed" if found != zeros else ""
        if forward.prefix_lens[request] <= 0 and not (found and found == wrote and self._of_one(pool, wrote)):
            return ""
        if position == _NOBODYS:
            return "padding" if forward.prefix_lens[request] > 0 else ""
        if not event:
            return ""
        if position != int(forward.prefix_lens[request]):
            own = _prefix_chain(forward, truth, request, position)
            same = own == theirs if own and theirs else writer in (-1, int(forward.request_ids[request]))
            return "other_position" if same else "other_prefix"
        if chain and theirs and chain != theirs:
            return "other_prefix"
        return "changed_bytes" if wrote and found and wrote != found else ""

    def _of_one(self, pool: int, wrote: int) -> bool:
        """Say whether bytes, by their hash, were left by one request alone, and are not those of a slot that was zeroed."""
        slots = self.slots[pool]
        left_by = np.unique(slots[slots[:, STATE_HASH] == wrote, STATE_REQUEST])
        return wrote not in (self.cleared[pool, 0], self._header.states[pool].zeros) and len(left_by) == 1

    def _chains(self, forward: Forward, truth: Truth) -> tuple[Int64Array, Int64Array]:
        """Return the chain of each request's prefix and of that with what the forward adds, `[bs]` each; 0 for unknown."""
        rows, tokens = forward.req_pool_indices, batch_tokens(forward)
        last = self.chains[np.where((rows > 0) & (rows < len(self.chains)), rows, 0)]
        goes_on = (last[:, _CHAIN_REQUEST] == forward.request_ids) & (last[:, _CHAIN_END] == forward.prefix_lens)
        before = np.where(goes_on, last[:, _CHAIN], 0)
        for request in np.flatnonzero(~goes_on | (forward.prefix_lens == 0)).tolist():
            before[request] = _prefix_chain(forward, truth, request, int(forward.prefix_lens[request]))
        fed = forward.input_ids[: len(tokens.request)]
        ends = np.searchsorted(tokens.request, np.arange(len(rows) + 1))
        sums = np.append(np.uint64(0), np.cumsum(_words(fed, tokens.position)))
        added = (sums[ends[1:]] - sums[ends[:-1]]).view(np.int64)
        known = before != 0
        np.logical_and.at(known, tokens.request, fed != UNKNOWN_TOKEN)
        return before, np.where(known, _nonzero(before + added), 0)


def _prefix_chain(forward: Forward, truth: Truth, request: int, length: int) -> int:
    """Return the chain of the first `length` tokens that a request has by the scheduler's account, 0 if that is unknown."""
    row = int(forward.req_pool_indices[request])
    if length <= 0:
        return _NOTHING_READ
    if truth is None or forward.truth_lens is None or not 0 < row < len(truth) or forward.truth_lens[request] < length:
        return 0
    tokens = truth[row, :length]
    if len(tokens) < length or (tokens == UNKNOWN_TOKEN).any():
        return 0
    total = _words(tokens, np.arange(length)).sum(dtype=np.uint64, keepdims=True).view(np.int64)
    return int(_nonzero(total + _NOTHING_READ)[0])


def _took_another_token(forward: Forward, truth: Truth, request: int) -> bool:
    """Say whether a request computed one token, and another one than the last of its prefix: that changes any state."""
    row, prefix = int(forward.req_pool_indices[request]), int(forward.prefix_lens[request])
    known = truth is not None and forward.truth_lens is not None and forward.truth_lens[request] >= prefix > 0
    if forward.failed or not known or truth is None or not 0 < row < len(truth) or forward.extend_lens[request] != 1:
        return False
    fed = int(forward.input_ids[int(np.maximum(forward.extend_lens[:request], 0).sum())])
    before = int(truth[row, prefix - 1])
    return UNKNOWN_TOKEN not in (fed, before) and fed != before


def _words(tokens: npt.NDArray[np.integer], positions: Int64Array) -> npt.NDArray[np.uint64]:
    """Return what each token at its position adds to a chain; of a token the 32 bits that a truth table holds."""
    at = splitmix64_words(positions.astype(np.uint64) + np.uint64(_NOTHING_READ))
    return splitmix64_words(at ^ tokens.astype(np.int32).astype(np.uint64))


def _nonzero(chains: Int64Array) -> Int64Array:
    return np.where(chains == 0, _NOTHING_READ, chains)
