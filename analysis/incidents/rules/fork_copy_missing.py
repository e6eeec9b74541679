"""A fork has slots of its own for the begun page, and nothing was copied there.

Mechanism: a request begins with a prefix that it did not compute, reads slots that were given to it alone, and nobody
has written or copied into them since.
"""

from ..case import CONTENT, Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query


def judge(case: Case) -> Judgement | None:
    """Score a case in which a request begins with fresh slots of its own that hold nothing."""
    for sign in case.head:
        if sign.kind not in ("hit_never_written", "hit_differs") and not sign.bits & CONTENT:
            continue
        given = case.last(sign, ["alloc", "shared", "cached"])
        begin = case.facts.begins.get(sign.request_id)
        if given is None or given.what != "alloc" or given.request_id != sign.request_id or begin is None:
            continue
        if begin.prefix_len <= sign.position or case.last(sign, ["copied", "loaded", "received", "receive_failed"]):
            continue
        admitted = case.facts.status_before(sign.request_id, sign.event)
        if admitted is not None and admitted.event > begin.event:
            continue
        return Judgement(
            score=0.92,
            sentence=f"{reader(sign)} began in forward {begin.forward} with {begin.prefix_len} tokens that it did not compute, "
            f"and nothing had been copied to its own {place(sign)}, given to it in event {given.event}",
            evidence=(slot_query(case.group(sign), sign.slot), events_query([given.event, begin.event])),
            cause_event=given.event,
        )
    return None


RULE = Rule(
    kind="fork_copy_missing",
    title="a fork's copy is missing",
    mechanism="A fork gets fresh slots for the page that its parent had begun, and the parent's KV is not copied. (lab)",
    judge=judge,
)
