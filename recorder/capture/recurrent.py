"""What happens to slots of recurrent state, between forwards and in them, and the hashes of their bytes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.capture.frames import STATE_SAID
from ...kernels.ops.state_hash.reference import state_hashes
from ..state.recurrent import CLEAR, COPY, SAVE, STEP
from ..trace.header import StatePool, TraceHeader
from .host_arrays import as_rows, own_int64
from .privacy import Privacy

StateChange = Literal["clear", "copy"]
_FIRST: Final = np.zeros(1, np.int64)
_COLUMNS: Final = tuple(f"recurrent_{name}" for name in ["pool", "op", "request", "source", "slot", "before", "after"])


class StateAccess(NamedTuple):
    """Which slots of a state pool a forward reads and writes: `reads`, `writes` `[bs]`, any integer type.

    A request reads -1 if it begins with no state, and writes -1 if it has none in this pool. `ran`: what it has read is
    written over by now, and is not hashed; of a forward that is told after the step that it was a part of. `saves` `[bs]` are
    slots in which the forward leaves the state behind a request's first `saved_tokens` `[bs]` tokens, too, -1 for none.
    """

    reads: Any
    writes: Any
    ran: bool = False
    saves: Any = ()
    saved_tokens: Any = ()

    def of(self, chosen: Int64Array, *, ran: bool = False) -> "StateAccess":
        """Return what some requests `[n]` of the forward read and write."""
        saves, tokens = (own_int64(part)[chosen] if len(part) else part for part in (self.saves, self.saved_tokens))
        return StateAccess(
            own_int64(self.reads)[chosen], own_int64(self.writes)[chosen], self.ran or ran, saves, tokens
        )


class RecurrentCapture:
    """The slots' bytes, `sources[pool]`: of each part of the sampled layer a tensor `[num_slots, ...]` on the host.

    `note` takes what happens between forwards, `begin` what a forward reads; `end` gives the columns of its event. Raises
    `ValueError` for what the header's `states` do not have.
    """

    def __init__(
        self, header: TraceHeader, sources: Mapping[int, Sequence[Any]], privacy: Privacy | None, backend: str = "cpu"
    ) -> None:
        self._pools = header.states
        known = range(len(header.states))
        if not set(sources) <= set(known):
            raise ValueError(f"state_sources has pools {sorted(sources)}, the header's states have {list(known)}")
        self._sources = {pool: list(parts) for pool, parts in sources.items()}
        self._privacy = privacy
        self._backend = backend
        self._unknown = False
        self._waiting: list[tuple[int, ...]] = []
        self._steps: list[tuple[int, ...]] = []
        self._ops: list[tuple[int, ...]] = []

    def note(self, change: StateChange, pool: int, slots: Any, sources: Any) -> None:
        """Take note of slots that were zeroed, or have become copies of `sources`, just now."""
        to, of = own_int64(slots, "slots").reshape(-1), own_int64(sources, "sources").reshape(-1)
        if not 0 <= pool < len(self._pools) or (change == "copy") != bool(of.size) or of.size not in (0, to.size):
            raise ValueError(
                f"a {change} in state pool {pool} of {to.size} slots from {of.size}, expected as many, or none"
            )
        op, of = (COPY, of) if change == "copy" else (CLEAR, np.full_like(to, -1))
        pairs = zip(of.tolist(), to.tolist(), strict=True)
        self._waiting += [(pool, op, -1, source, slot, 0, self._hash(pool, slot)) for source, slot in pairs]

    def note_hashed(self, change: StateChange, pool: int, changed: Int64Array) -> None:
        """As `note`, of what a device has hashed: `changed` `[3, n]` slots, their sources (-1 for none) and their hashes.

        A slot that is copied onto itself, and not hashed, tells nothing; of one that there is not nobody knows what was changed.
        """
        op = COPY if change == "copy" else CLEAR
        changed = changed[:, (changed[0] != changed[1]) | (changed[2] != 0)]
        num_slots = self._pools[pool].num_slots
        if ((changed[0] < 0) | (changed[:2] >= num_slots)).any():
            self.give_up()
            return
        self._waiting += [
            (pool, op, -1, source, slot, 0, self._kept(found)) for slot, source, found in changed.T.tolist()
        ]

    def hashed(
        self, runner: int, rows: Int64Array, reads: BoolArray, found: Sequence[Int64Array]
    ) -> dict[str, Int64Array]:
        """Return the columns of a forward that a device has captured; `reads` `[bs]` bool are the requests that read.

        `found` has of each of the runner's pools `[3, bs]`: slots, hashes before and after; nothing if it was not looked at. Where a
        slot says who reads (`STATE_SAID`), it is these.
        Behind these, of each pool that has states saved, the slots, how many tokens they are behind, and hashes after. A pool
        of which a slot does not exist is left out: then nobody knows what was written.
        """
        ops, self._waiting = self._waiting, []
        mine = [number for number, pool in enumerate(self._pools) if pool.runner == runner]
        of_pools: list[tuple[int, Int64Array, Int64Array, BoolArray]] = []
        for place, (pool, values) in enumerate(zip(mine * 2, () if self._unknown else found, strict=False)):
            slots = np.where(values[0] < 0, values[0], values[0] % STATE_SAID)
            begins = np.where(values[0] < STATE_SAID, reads, values[0] >= 2 * STATE_SAID)
            sources = np.where(begins, slots, -1) if place < len(mine) else values[1]
            of_pools.append((pool, slots, sources, (rows > 0) & (slots != -1)))
        out = {
            pool
            for pool, slots, _, live in of_pools
            if ((slots[live] < 0) | (slots[live] >= self._pools[pool].num_slots)).any()
        }
        seen_ops: list[tuple[int, ...]] = []
        for place, (pool, slots, sources, live) in enumerate(of_pools):
            op, (_, before, after) = (STEP if place < len(mine) else SAVE), found[place]
            for request in np.flatnonzero(live).tolist() if pool not in out else ():
                old = self._kept(int(before[request])) if op == STEP else 0
                place_of = int(sources[request]), int(slots[request])
                seen_ops.append((pool, op, request, *place_of, old, self._kept(int(after[request]))))
        return _columns(ops + sorted(seen_ops, key=itemgetter(0)))

    def lose(self) -> None:
        """Drop what waits for a forward that is not recorded."""
        self._waiting = []

    def give_up(self) -> None:
        """Record no more of what forwards read and write: some changes of slots were not seen."""
        self._unknown = True

    def begin(self, runner: int, rows: Int64Array, states: Sequence[StateAccess | None]) -> None:
        """Take what the runner's forward, whose requests have these rows, is about to read."""
        self._ops, self._waiting = self._waiting, []
        self.given(runner, rows, states)

    def given(self, runner: int, rows: Int64Array, states: Sequence[StateAccess | None]) -> None:
        """Take it once more, of a forward that has begun and has not reached its layers."""
        if len(states) not in (0, len(self._pools)):
            raise ValueError(
                f"states has length {len(states)}, expected one for each of the header's {len(self._pools)}"
            )
        self._steps = []
        for pool, access in enumerate(states):
            if access is None or self._pools[pool].runner != runner:
                continue
            reads, writes = (own_int64(slots)[: rows.size].tolist() for slots in access[:2])
            for request, (read, write, row) in enumerate(zip(reads, writes, rows.tolist(), strict=True)):
                if row and write >= 0:
                    found = 0 if read < 0 or access.ran else self._hash(pool, read)
                    self._steps.append((pool, STEP, request, read, write, found))
            saves, tokens = (own_int64(part)[: rows.size].tolist() for part in access[3:])
            self._steps += [
                (pool, SAVE, request, count, slot, 0)
                for request, (slot, count) in enumerate(zip(saves, tokens, strict=True))
                if rows[request] and slot >= 0
            ]

    def end(self) -> dict[str, Int64Array]:
        """Return the columns of the forward that has run."""
        ops = self._ops + [(*step, self._hash(step[0], step[4])) for step in self._steps]
        self._ops, self._steps = [], []
        return _columns(ops)

    def drop(self) -> None:
        """Let go of the engine's tensors."""
        self._sources.clear()

    def with_zeros(self) -> tuple[StatePool, ...]:
        """Return the header's pools with the hash of a slot of zeros, of those whose slots are read here."""
        return tuple(
            replace(pool, zeros=self._hash_of([np.zeros_like(row) for row in self._rows(number, 0)]))
            for number, pool in enumerate(self._pools)
        )

    def _hash(self, pool: int, slot: int) -> int:
        """Return the hash of a slot's bytes, 0 if there are none to read."""
        if not 0 <= slot < self._pools[pool].num_slots:
            raise ValueError(f"slot {slot} of state pool {pool}, expected 0 to {self._pools[pool].num_slots - 1}")
        return self._hash_of(self._rows(pool, slot))

    def _rows(self, pool: int, slot: int) -> list[ByteArray]:
        return [_hashed(part[slot], self._pools[pool]) for part in self._sources.get(pool, ())]

    def _hash_of(self, rows: list[ByteArray]) -> int:
        if not rows:
            return 0
        found = state_hashes(parts=rows, num_slots=1, slots=_FIRST, backend=self._backend)
        return self._kept(int(found[0]))

    def _kept(self, found: int) -> int:
        """Return a hash as the trace has it: keyed, if tokens are kept private."""
        if self._privacy is None or not found:
            return found
        content = found.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(content, digest_size=8, key=self._privacy.kv_key).digest()
        return int.from_bytes(digest, "little", signed=True) or 1


def _columns(ops: list[tuple[int, ...]]) -> dict[str, Int64Array]:
    return dict(zip(_COLUMNS, np.array(ops, np.int64).reshape(-1, len(_COLUMNS)).T.copy(), strict=True))


def _hashed(row: Any, pool: StatePool) -> ByteArray:
    """Return the bytes of a slot's part, numpy's or torch's, that are hashed, `[1, n]`, in the order of its elements."""
    elements = row.reshape(-1)
    count = min(-(-pool.hashed_bytes // row.itemsize), len(elements))
    if pool.from_end:
        found = as_rows(elements[len(elements) - count :].reshape(1, -1))
        return found[:, max(found.shape[1] - pool.hashed_bytes, 0) :]
    return as_rows(elements[:count].reshape(1, -1))[:, : pool.hashed_bytes]
