"""An entry of a request's row points to a slot of somebody else.

Mechanism: an entry of the block table, inside what the request has computed, is overwritten without an allocation. What
the slot holds is whole and somebody else's: token, position and chain differ at one place, and the chain once more
behind it.
"""

from ..case import CONTENT, Case, Judgement, Rule, Sign
from ..facts import Rewrite
from ..words import events_query, place, reader, slot_query, when, writer


def rewrite_of(case: Case, sign: Sign) -> Rewrite | None:
    """Return the last change of the sign's request's row that covers its position, before it."""
    found = None
    for change in case.facts.rewrites.get(sign.request_id, ()):
        inside = change.first_position <= sign.position < change.first_position + change.count
        if change.event <= sign.event and inside:
            found = change
    return found


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with foreign content at one position."""
    sign = case.violation(CONTENT)
    if sign is None or sign.request_id < 0 or sign.position < 0:
        return None
    change = rewrite_of(case, sign)
    wrong = {other.position for other in case.head if other.bits & ~1 & CONTENT and other.request_id == sign.request_id}
    said = (
        f"the table row of {reader(sign)} pointed at {place(sign)} in {when(sign)}: it holds token {sign.stored_token}, "
        f"position {sign.stored_position}, written by {writer(sign)}"
    )
    evidence = (slot_query(case.group(sign), sign.slot),)
    if change is None:
        if case.has_trace:
            return Judgement(score=0.25, sentence=said, evidence=evidence)
        return Judgement(score=0.55 if len(wrong) == 1 else 0.3, sentence=said, evidence=evidence)
    given = case.last(sign, ["alloc", "shared"])
    fresh = (
        given is not None
        and given.request_id == sign.request_id
        and not any(fact.what == "written" and given.event < fact.event < change.event for fact in case.history(sign))
    )
    score = 0.93 - (0.25 if change.count > 1 else 0) - (0.3 if fresh else 0)
    return Judgement(
        score=score,
        sentence=f"{said}; the entry was overwritten before event {change.event}",
        evidence=(*evidence, events_query([change.event])),
        cause_event=change.event,
    )


RULE = Rule(
    kind="req_to_token",
    title="stale table entry",
    mechanism="A block-table entry of a running request points to another slot, which was not given to it. (canary)",
    judge=judge,
)
