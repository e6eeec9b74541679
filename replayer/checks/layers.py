"""What sampling streams see of all layers: bytes that nobody wrote, and values that no model writes."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.capture.layers import CHUNK_WORDS, ZEROS, watched_bytes
from ...kernels.replay_pass.ledger import CONTENT
from ...recorder.state.forward import Forward, runner_of
from ...recorder.state.writes import KvChanges
from ...recorder.trace.header import KvStream
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import SUBMITTED, WRITTEN_VALUES
from ..report.findings import Cause, Finding, evidence
from .check import Covered, Explained, HistoryCheck, register
from .history import ForwardView, GroupReads

_CHUNK_BYTES: Final = 8 * CHUNK_WORDS
BEHIND_THE_FIRST: Final = ", and so in all layers behind the first"
_SAID: Final = {
    "nan": "NaN in {rows} of K or V written",
    "infinite": "an infinity in {rows} of K or V written",
    "zeros": "{rows} of K or V written {are} all zeros, as none of that layer was before",
    "saturated": "every value of {rows} of K or V written is 0 or at the end of what the 8-bit type can hold",
    "handed_zeros": "{rows} of K or V handed to the cache {are} all zeros, as none of that layer was before",
}


@register
class LayerChanged(HistoryCheck):
    """Bytes of a slot changed in some layer, and nobody wrote them; those that the canary hashes are as they were.

    Of each slot 16 bytes of one layer are looked at, of another layer and place in each. Not judged: slots that nobody was
    seen to write, and those whose first bytes in the first layer have changed too, which is a violation.
    """

    kind = "layer_changed"
    finds = "bytes of K or V changed without a write, in a layer or place that the canary does not hash"
    covered = Covered.COMPILED  # which stops in front of an event with changes
    events = frozenset({"sweep", "transfer"})

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        """Find each request that reads such slots."""
        changed = self._changed(view.event)
        for group in view.groups if changed else ():
            for stream, slots in changed.get(group.pool.index, ()):
                yield from self._read(view, group, stream, slots)

    def _read(self, view: ForwardView, group: GroupReads, stream: KvStream, slots: Int64Array) -> list[Finding]:
        pool = group.pool.pool
        entries = np.flatnonzero(
            np.isin(group.slots, slots) & ~pool.unknown[np.minimum(group.slots, len(pool.unknown) - 1)]
        )

        def explain(n: int) -> Explained:
            slot = int(group.slots[entries[n]])
            return self._said(stream, slot), [int(pool.writers[slot, 0]) - 1], Cause("changed_bytes")

        return self.of_entries(
            view,
            group,
            explain,
            requests=group.readers(entries),
            positions=group.positions[entries],
            slots=group.slots[entries],
        )

    def event(self, view: EventView) -> Iterator[Finding]:
        """Find such slots of the prefix cache, or of a transfer."""
        for number, found in self._changed(view).items():
            for stream, slots in found:
                slot, written = int(slots[0]), self.history.ledger.rows[number][slots, CONTENT]
                yield Finding(
                    kind=self.kind,
                    event=view.number,
                    forward=int(view.scalar("forward")),
                    time_ns=view.time_ns,
                    runner=self.history.header.groups[number].runner,
                    group=number,
                    slot=slot,
                    detail=self._said(stream, slot),
                    count=len(slots),
                    evidence=evidence((int(event) - 1 for event in written[:1]), view.number),
                    cause="changed_bytes",
                )

    def _said(self, stream: KvStream, slot: int) -> str:
        layer, first = looked_at(stream, slot, self.history.backend)
        where = f"bytes {first} to {first + _CHUNK_BYTES - 1} of {stream.half} in layer {layer}"
        return f"{where} are not those written there"

    def _changed(self, view: EventView) -> dict[int, list[tuple[KvStream, Int64Array]]]:
        """Return by group the slots that changed in sampling streams, `[n] int64`, and in none of the canary's."""
        numbers, slots = view.ints("kv_change_stream"), view.ints("kv_change_slot")
        found: dict[int, list[tuple[KvStream, Int64Array]]] = {}
        if not len(numbers):
            return found
        runner = runner_of(view, self.history.header)
        KvChanges(view, self.history.header, runner)  # which raises if they do not fit the header
        streams = self.history.header.streams(runner)
        for number in np.unique(numbers).tolist():
            index, stream = streams[number]
            if not stream.samples:
                continue
            others = [n for n, (of, other) in enumerate(streams) if of == index and not other.samples]
            mine = np.setdiff1d(slots[numbers == number], slots[np.isin(numbers, others)])
            mine = mine[self.history.ledger.rows[index][mine, CONTENT] > 0]
            if len(mine):
                found.setdefault(index, []).append((stream, mine))
        return found


@register
class BadValues(HistoryCheck):
    """A forward wrote NaN, infinity, or a row of zeros or of saturated values to K or V of some layer.

    NaN spreads: what attends to it is NaN, too. Found is the first of a request, in the lowest layer; what the same request
    writes in the forwards that follow says nothing new. Rows of zeros are looked at behind a group's first layer and a
    request's first token, and only in a layer that has written a good many rows of which none was; it is said if they are all
    that some tokens wrote behind it. Values of 8 bits whose scale is wrong are stored as 0 or as the largest that there is: a row
    that holds nothing else says nothing.
    """

    kind = "bad_values"
    finds = "a forward wrote NaN, infinity, or a row of zeros or of saturated values to K or V"
    covered = Covered.COMPILED  # which stops in front of a forward with such values

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        """Find the first such value of each request that wrote none in its forward before."""
        forward, values = view.forward, view.forward.values
        wrote = {} if values is None else {r: values[values[:, 0] == r] for r in np.unique(values[:, 0]).tolist()}
        fresh = self.repeats.new(-1, forward, {r: np.unique(mine[:, 2]) for r, mine in wrote.items()})
        for request, mine in wrote.items():
            if not fresh[request].any():
                continue
            _, number, kind, layer, token, _ = mine[np.lexsort((mine[:, 2], mine[:, 1], mine[:, 3]))[0]].tolist()
            cause, rows = WRITTEN_VALUES[kind], int(mine[mine[:, 2] == kind, 5].sum())
            group, stream = self.history.header.streams(forward.runner)[number]
            count = ("one row", "is") if rows == 1 else (f"{rows:,} rows", "are")
            found = Cause(cause)
            if cause == "zeros" and stream.origin == SUBMITTED:  # no write that did not come to the pool
                found = Cause("handed_zeros")
            said = _SAID[found.cause].format(rows=count[0], are=count[1])
            phase = {"extend": "prefill", "draft_extend": "prefill"}.get(forward.mode, forward.mode)
            place = {"group": group, "position": int(forward.positions[token])}
            written = next((one.written for one in view.groups if one.pool.index == group), None)
            if written is not None:
                place["slot"] = int(written[token])
            detail = f"{said} in {phase}, first in {stream.half} of layer {layer}"
            if kind == ZEROS and self._all_behind_the_first(forward, mine, token):
                detail += BEHIND_THE_FIRST
            yield self.of_request(forward, request, detail, cause=found, **place)

    def _all_behind_the_first(self, forward: Forward, mine: Int64Array, token: int) -> bool:
        """Say whether the rows of zeros that a request wrote are those of K and V in all layers behind the first, of some tokens.

        Of a token whose first layer holds zeros as well, all of it may not have come there.
        """
        streams, zeros = list(self.history.header.streams(forward.runner)), mine[mine[:, 2] == ZEROS]
        first = [data[token] for (_, one), data in zip(streams, forward.kv_bytes, strict=True) if not one.samples]
        if not any(row.any() for row in first):
            return False
        behind = np.array([len(streams[number][1].layers) - 1 for number in zeros[:, 1].tolist()], np.int64)
        if len(zeros) != 2 or behind.min() < 2 or (zeros[:, 5] % behind).any():
            return False
        k_tokens, v_tokens = zeros[:, 5] // behind
        return bool(k_tokens == v_tokens)


def looked_at(stream: KvStream, slot: int, backend: str) -> tuple[int, int]:
    """Return of a stream that samples layers which one a slot's bytes are of, and which byte of its token is the first."""
    layers, chunks = len(stream.layers), stream.num_chunks
    at = watched_bytes(np.array([slot]), seed=stream.seed, num_layers=layers, num_chunks=chunks, backend=backend)[0]
    return stream.layers[int(at[0])], int(at[1]) * _CHUNK_BYTES
