"""What happens to slots of recurrent state, between forwards and in them, and the hashes of their bytes."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ..state.recurrent import CLEAR, COPY, STEP
from ..trace.header import TraceHeader
from .host_arrays import as_rows, own_int64
from .privacy import Privacy

StateChange = Literal["clear", "copy"]
_COLUMNS: Final = tuple(f"recurrent_{name}" for name in ["pool", "op", "request", "source", "slot", "before", "after"])


class StateAccess(NamedTuple):
    """Which slots of a state pool a forward reads and writes: `reads`, `writes` `[bs]`, any integer type.

    A request reads -1 if it begins with no state, and writes -1 if it has none in this pool. `ran`: what it has read is
    written over by now, and is not hashed; of a forward that is told after the step that it was a part of.
    """

    reads: Any
    writes: Any
    ran: bool = False

    def of(self, chosen: Int64Array, *, ran: bool = False) -> "StateAccess":
        """Return what some requests `[n]` of the forward read and write."""
        return StateAccess(own_int64(self.reads)[chosen], own_int64(self.writes)[chosen], self.ran or ran)


class RecurrentCapture:
    """The slots' bytes, `sources[pool]`: of each part of the sampled layer a tensor `[num_slots, ...]` on the host.

    `note` takes what happens between forwards, `begin` what a forward reads; `end` gives the columns of its event. Raises
    `ValueError` for what the header's `states` do not have.
    """

    def __init__(self, header: TraceHeader, sources: Mapping[int, Sequence[Any]], privacy: Privacy | None) -> None:
        self._pools = header.states
        known = range(len(header.states))
        if not set(sources) <= set(known):
            raise ValueError(f"state_sources has pools {sorted(sources)}, the header's states have {list(known)}")
        self._sources = {pool: list(parts) for pool, parts in sources.items()}
        self._privacy = privacy
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

    def begin(self, runner: int, rows: Int64Array, states: Sequence[StateAccess | None]) -> None:
        """Take what the runner's forward, whose requests have these rows, is about to read."""
        if len(states) not in (0, len(self._pools)):
            raise ValueError(
                f"states has length {len(states)}, expected one for each of the header's {len(self._pools)}"
            )
        self._ops, self._waiting, self._steps = self._waiting, [], []
        for pool, access in enumerate(states):
            if access is None or self._pools[pool].runner != runner:
                continue
            reads, writes = (own_int64(slots)[: rows.size].tolist() for slots in access[:2])
            for request, (read, write, row) in enumerate(zip(reads, writes, rows.tolist(), strict=True)):
                if row and write >= 0:
                    found = 0 if read < 0 or access.ran else self._hash(pool, read)
                    self._steps.append((pool, STEP, request, read, write, found))

    def end(self) -> dict[str, Int64Array]:
        """Return the columns of the forward that has run."""
        rows = self._ops + [(*step, self._hash(step[0], step[4])) for step in self._steps]
        self._ops, self._steps = [], []
        return dict(zip(_COLUMNS, np.array(rows, np.int64).reshape(-1, len(_COLUMNS)).T.copy(), strict=True))

    def drop(self) -> None:
        """Let go of the engine's tensors."""
        self._sources.clear()

    def _hash(self, pool: int, slot: int) -> int:
        """Return the hash of a slot's bytes, 0 if there are none to read."""
        if not 0 <= slot < self._pools[pool].num_slots:
            raise ValueError(f"slot {slot} of state pool {pool}, expected 0 to {self._pools[pool].num_slots - 1}")
        parts = self._sources.get(pool, ())
        if not parts:
            return 0
        key = b"" if self._privacy is None else self._privacy.kv_key
        found = hashlib.blake2b(digest_size=8, key=key)
        for part in parts:
            found.update(_leading(part[slot], self._pools[pool].hashed_bytes))
        return int.from_bytes(found.digest(), "little", signed=True) or 1


def _leading(row: Any, most: int) -> bytes:
    """Return the first bytes of a slot's part, numpy's or torch's, in the order of its elements."""
    size = row.itemsize
    return bytes(as_rows(row.reshape(-1)[: -(-most // size)].reshape(1, -1))[0, :most])
