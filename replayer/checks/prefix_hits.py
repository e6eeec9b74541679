"""Prefix slots that a request starts from, and that hold nothing, or something else."""

import numpy as np

from ...kernels.arrays import record_words
from ...kernels.constants import RECORD_POSITION, RECORD_TOKEN
from ...kernels.replay_pass.ledger import ALLOC, BEING_WRITTEN, CONTENT, DIFFERS, NEVER_WRITTEN
from ..report.findings import Cause
from .check import Access, Covered, Explained, LedgerCheck, happened, register


@register
class HitNeverWritten(LedgerCheck):
    """A forward reads a slot that nobody has written since it was given out.

    Invariant: a prefix slot was written, copied to or filled by a transfer after its last allocation, by an earlier
    forward. A prefix hit in the very forward that is still writing the content, a failed load-back or transfer that is
    taken for done, and a prefix that counts tokens never computed show here. Evidence: the allocation, the write before it
    if there was one, and the forward. Legitimate exceptions: a load-back's and a fork's copy count as writing. If the
    trace does not promise to report every slot, only two cases are judged: another request of the same forward writes the
    slot, and a slot given out afresh to another request still has the content from before.
    """

    kind = "hit_never_written"
    finds = "a forward reads a slot that nobody has written since it was given out"
    covered = Covered.COMPILED
    reads = NEVER_WRITTEN | BEING_WRITTEN

    def explain(self, access: Access) -> Explained:
        """Say what is known of the slot's content."""
        row = access.row
        if access.bits & BEING_WRITTEN:
            detail = "reads a slot that another request of the same forward is writing"
            return detail, happened(row), Cause("same_forward")
        since = f"was written in event {row[CONTENT] - 1}" if row[CONTENT] else "was never written"
        cause = Cause("written_before" if row[CONTENT] else "never_written")
        return f"reads a slot that was given out in event {row[ALLOC] - 1} and {since}", happened(row), cause


@register
class HitDiffers(LedgerCheck):
    """A request starts from slots that hold other tokens or positions than its own.

    Invariant: if a request reads a position for the first time and somebody else wrote the slot (prefix hit, fork,
    load-back, a table row that points elsewhere), the slot's record has the position and the token that the scheduler has
    there. Evidence: the event that wrote the slot and the forward. A prefix node whose tokens were cut while its hash was
    kept shows here. Legitimate exceptions: KV bytes may differ, since equal prefixes computed twice do; positions that the
    request has read before are the canary's own business; without truth tokens only positions are compared.
    """

    kind = "hit_differs"
    finds = "a request starts from slots that hold other tokens or positions than its own"
    covered = Covered.COMPILED
    reads = DIFFERS

    def explain(self, access: Access) -> Explained:
        """Say what the slot holds, who wrote it, and what was expected."""
        pool, plan = access.group.pool, access.group.plan
        slot, token = int(plan.slots[access.entry]), int(plan.expected_tokens[access.entry])
        record = record_words(pool.pool.tail[pool.group.halves[0]], written=False)[slot]
        event, forward, writer = pool.last_writers(np.array([slot]))[0].tolist()
        expected = f"position {int(plan.expected_positions[access.entry])}"
        if token != -1:
            expected = f"token {token}, {expected}"
        detail = (
            f"starts from a slot with token {int(record[RECORD_TOKEN])}, position {int(record[RECORD_POSITION])}, "
            f"written by request {self.history.request_table.name(writer)} in forward {forward}; expected {expected}"
        )
        return detail, [event], Cause("", writer, int(record[RECORD_TOKEN]), token)
