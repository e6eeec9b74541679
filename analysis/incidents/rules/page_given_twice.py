"""The allocator gave out a page that somebody holds.

Mechanism: an allocation names a slot that another request was given and never gave back.
"""

from ..case import CONTENT, Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when
from .free_too_early import given_to_another


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a double allocation."""
    sign = case.finding("slot_double_allocated")
    if sign is not None:
        return Judgement(
            score=0.93,
            sentence=f"{place(sign)} was given to {reader(sign)} after {when(sign)}: it {sign.detail}",
            evidence=(slot_query(sign.group, sign.slot), events_query(sign.evidence)),
            cause_event=sign.event,
        )
    for other in case.head:
        # Where only sliding-window slots are told of, a held full page shows by getting a second half.
        moved = case.last(other, ["remapped"])
        full_group = any(group.lut < 0 and group.table == 0 for group in case.groups)
        if moved is not None and not full_group:
            return Judgement(
                score=0.64,
                sentence=f"the page of full slot {moved.via} was given out again in event {moved.event} while it was held; "
                f"{reader(other)} read {place(other)} in {when(other)}",
                evidence=(slot_query(case.group(other), other.slot), events_query([moved.event, other.event])),
                cause_event=moved.event,
            )
    for other in case.head:
        again = given_to_another(case, other)
        if again is not None:
            return Judgement(
                score=0.58,
                sentence=f"{place(other)} was given out again in event {again.event} while {reader(other)} held it; read in "
                f"{when(other)}",
                evidence=(slot_query(case.group(other), other.slot), events_query([again.event, other.event])),
                cause_event=again.event,
            )
    wrong = case.violation(CONTENT)
    if wrong is None:
        return None
    # The same slot at two positions of one request: the allocator gave it out twice to the same one.
    twice = wrong.writer_request_id == wrong.request_id >= 0 and wrong.stored_position != wrong.position
    if twice:
        return Judgement(
            score=0.6,
            sentence=f"{reader(wrong)} has {place(wrong)} at position {wrong.stored_position} too, where it wrote it in "
            f"forward {wrong.writer_forward}: the page was given to it twice",
            evidence=(slot_query(case.group(wrong), wrong.slot),),
        )
    return None


RULE = Rule(
    kind="page_given_twice",
    title="a held page was given out",
    mechanism="The allocator hands out a page that is not free. (lab)",
    judge=judge,
)
