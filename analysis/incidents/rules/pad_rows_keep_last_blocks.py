"""Padded rows of a graph kept the slots of the step before, and wrote them.

Mechanism: padding is written to slots that somebody holds or reads.
"""

from ..case import KV_HASH, Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case in which padding writes a slot in use."""
    sign = case.finding("padded_write")
    if sign is not None:
        return Judgement(
            score=0.95,
            sentence=f"padding of {when(sign)} wrote {place(sign)}: it {sign.detail}",
            evidence=(slot_query(case.group(sign), sign.slot), events_query(sign.evidence)),
        )
    for other in case.head:
        padded = case.last(other, ["padded"])
        given = case.last(other, ["alloc"])
        if padded is None or not other.bits & KV_HASH:
            continue
        stale = given is not None and given.event > padded.event
        return Judgement(
            score=0.94 if not stale else 0.3,
            sentence=f"padding of event {padded.event} wrote {place(other)}, which {reader(other)} read in {when(other)}",
            evidence=(slot_query(case.group(other), other.slot), events_query([padded.event])),
        )
    return None


RULE = Rule(
    kind="pad_rows_keep_last_blocks",
    title="padding wrote a live slot",
    mechanism="Rows that pad a batch keep the slots that they had a step before. (lmdeploy#4569)",
    judge=judge,
    recurs=True,
)
