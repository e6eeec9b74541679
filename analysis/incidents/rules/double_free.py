"""A page was given back twice.

Mechanism: a slot that is free is freed again, stands in the free list twice, and is given to two requests.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a second free."""
    sign = case.finding("slot_freed_twice") or case.finding("slot_freed_twice", anywhere=True)
    if sign is None:
        return None
    begins = sign.event == case.first.event
    by_itself = sign.request_id >= 0
    score = 0.93 if begins else 0.5
    if case.is_sliding(sign):
        score -= 0.15
    if not by_itself:
        score -= 0.1
    whose = reader(sign) if by_itself else "the prefix cache"
    return Judgement(
        score=score,
        sentence=f"{whose} gave back {place(sign)} after {when(sign)}: it {sign.detail}",
        evidence=(slot_query(sign.group, sign.slot), events_query(sign.evidence)),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="double_free",
    title="a page was given back twice",
    mechanism="A page enters the free list twice and later has two owners. (lab)",
    judge=judge,
)
