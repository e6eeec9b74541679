"""A leaving request forgot a page.

Mechanism: a request is gone and a slot is still held in its name; nothing else is wrong.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a leak."""
    sign = case.finding("slot_leaked")
    if sign is None:
        return None
    alone = set(case.kinds) == {"slot_leaked"} and not case.reasons
    return Judgement(
        score=0.93 if alone else 0.55,
        sentence=f"{place(sign)} leaked after {when(sign)}: {sign.detail} ({reader(sign)})",
        evidence=(slot_query(sign.group, sign.slot), events_query(sign.evidence)),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="page_leaked",
    title="a page leaked",
    mechanism="A request leaves and does not give back all it held. (lab)",
    judge=judge,
    aftermath=True,
)
