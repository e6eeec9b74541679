"""What attention reads is not what the block table and the batch have."""

from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.replay_pass.ledger import CACHED, HELD, STATE
from ...recorder.state.forward import Attention
from ...recorder.state.tables import look_up
from ..report.findings import NO_CAUSE, Finding
from .check import Covered, Explained, HistoryCheck, happened, held_by, register
from .history import ForwardView, GroupReads


@register
class WrongWindow(HistoryCheck):
    """A forward reads fewer or more positions of its prefix than its pool group's window has, or fewer than all without one.

    It may name the slot of the one before, the predecessor in the chain. Of engines that show a block table it is known only
    if the adapter sees what attention's kernels read of a window, or are made with.
    """

    kind = "wrong_window"
    finds = "a forward reads fewer or more positions of its prefix than its pool group's window has"
    covered = Covered.COMPILED  # which stops in front of a forward that has such a read

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        forward = view.forward
        for group, request, start, count in () if forward.windows is None else forward.windows.tolist():
            window, prefix = self.history.header.groups[group].window, int(forward.prefix_lens[request])
            end = max(start + count, prefix)  # beyond the prefix: of a later token of the forward, what lies before it
            positions = f"positions {start} to {start + count - 1}" if count else "nothing"
            detail = f"reads {positions} of "
            detail += f"what is before its token at position {end}, " if end > prefix else f"a prefix of {prefix}, "
            begins = f"the window of {window} begins at {max(end - window, 0)}"
            detail += begins if window else "all of which is to be read"
            yield self.of_request(forward, request, detail, group=group, position=start)


@register
class AttentionOutput(HistoryCheck):
    """What attention gave for a token is the mean of the values of no run of positions, of its request or another of the batch.

    Its query, and the keys and values in the slots that it is to read, are as the engine has them; which positions the kernel
    read, and by which weights, shows in its output alone. Where a run of positions explains the output, that is another finding:
    `wrong_window`, `attention_lens`, or `attention_slots`.
    """

    kind = "attention_output"
    finds = "what attention gave for a token is the mean of no run of positions that it could have read"
    covered = Covered.COMPILED  # which stops in front of a forward that has such an output

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        forward = view.forward
        outputs = np.empty((0, 4), np.int64) if forward.outputs is None else forward.outputs
        for request in np.unique(outputs[:, 1]).tolist():
            mine = outputs[outputs[:, 1] == request]
            group, _, position, layer = mine[0].tolist()
            detail = f"what attention gave in layer {layer} for the token at position {position} is no weighted mean of the values of "
            detail += "any run of its positions, nor of another request's"
            yield self.of_request(forward, request, detail, count=len(mine), group=group, position=position)


@register
class AttentionLens(HistoryCheck):
    """Attention reads more or less than a request has, or computes other query tokens than the forward adds.

    A cached prefix that is left out, a stale length and one that is one off show here. What a backend means by its lengths in
    a sliding window, a draft step or a verify forward is for the adapter to bring to whole requests before it records them.
    """

    kind = "attention_lens"
    finds = "attention reads more or less than a request has, or computes other query tokens than it adds"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        forward, got = view.forward, view.forward.attention
        derived = self.history.header.runners[forward.runner].derived
        if got is None or "prefix_lens" in derived or "extend_lens" in derived:
            return
        extend = np.maximum(forward.extend_lens, 0)
        end = forward.prefix_lens + extend
        unknown = np.full(len(end), -1, np.int64)
        seq_lens = got.seq_lens if len(got.seq_lens) else unknown
        query_lens = got.query_lens if len(got.query_lens) else unknown
        longer = (seq_lens >= 0) & (seq_lens != end)
        wrong = (longer | ((query_lens >= 0) & (query_lens != extend))) & (forward.req_pool_indices != 0)
        for r in np.flatnonzero(wrong).tolist():
            prefix, added = int(forward.prefix_lens[r]), int(extend[r])
            did, position = f"computed {int(query_lens[r]):,} query tokens", prefix
            if longer[r]:
                did, position = f"read {int(seq_lens[r]):,} tokens", min(prefix + added, int(seq_lens[r]))
            detail = f"attention {did}, the request has {prefix:,} cached and {added:,} new"
            yield self.of_request(forward, r, detail, position=position)


@register
class AttentionSlots(HistoryCheck):
    """Attention was given another slot than the block table holds, or than the forward writes, at a position that it reads.

    A copy of the block table that is overwritten in flight shows here and nowhere else: table and records stay whole. If the
    slots that a forward writes were worked out and not observed, nothing is said of them.
    """

    kind = "attention_slots"
    finds = "attention got another slot than the block table holds, at a position that it reads"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        got = view.forward.attention
        if (got is None or not len(got.slots)) and not len(self.repeats):
            return []
        return [finding for group in view.groups for finding in self._of_group(view, group, got)]

    def _of_group(self, view: ForwardView, group: GroupReads, got: Attention | None) -> list[Finding]:
        forward, index = view.forward, group.pool.index
        if got is None:
            self.repeats.new(index, forward, {})
            return []
        mine = np.flatnonzero(got.groups == index)
        expected = self._expected(view, group, got.requests[mine], got.positions[mine])
        ring = group.pool.group.reads_before_write  # which gets its own tokens as they are, those that stay nowhere too
        known = (expected > 0) | ((expected == 0) & (ring or 0 not in group.pool.group.padding_slots))
        differs = known & (got.slots[mine] != expected)
        wrong, expected = mine[differs], expected[differs]

        def explain(n: int) -> Explained:
            slot, position = int(got.slots[wrong[n]]), got.positions[wrong[n]]
            cached = position < forward.prefix_lens[got.requests[wrong[n]]]
            what = "the block table has" if cached else "this forward writes"
            holder, events, cause = self._who_has(index, slot)
            said = f"slot {slot}{holder}" if slot >= 0 else f"what is in no slot ({slot})"
            return f"attention got {said}, {what} {int(expected[n])}", events, cause

        requests, positions, slots = got.requests[wrong], got.positions[wrong], got.slots[wrong]
        return self.of_entries(
            view, group, explain, requests=requests, positions=positions, slots=slots, repeats=self.repeats
        )

    def _expected(
        self, view: ForwardView, group: GroupReads, requests: Int64Array, positions: Int64Array
    ) -> Int64Array:
        """Return the slot that each position of a request has after the forward, -1 if it was not recorded."""
        forward, pool = view.forward, group.pool.group
        rows, table = forward.req_pool_indices[requests], view.tables.req_to_token[pool.table]
        first = forward.prefix_lens[requests]
        stands, inside = look_up(table, rows, positions)
        expected = np.where(inside & (positions < first), stands, -1)
        if pool.lut >= 0:
            lut = view.tables.luts[pool.lut]
            known = (expected >= 0) & (expected < len(lut))
            expected = np.where(known, lut[np.where(known, expected, 0)], -1)
        own = positions - first
        written = (rows > 0) & (own >= 0) & (own < np.maximum(forward.extend_lens, 0)[requests])
        if "out_cache_loc" not in self.history.header.runners[forward.runner].derived:
            expected[written] = group.written[group.write_offsets[requests[written]] + own[written]]
        return expected

    def _who_has(self, group: int, slot: int) -> Explained:
        rows = self.history.ledger.rows[group]
        if not 0 <= slot < len(rows):
            return ", which the pool does not have", [], NO_CAUSE
        row = rows[slot]
        held = self.history.complete and row[STATE] in (HELD, CACHED)
        holder, cause = (f" of {self.holder(row)}", held_by(row)) if held else ("", NO_CAUSE)
        return holder, happened(row), cause
