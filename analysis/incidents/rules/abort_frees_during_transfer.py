"""Pages were freed while a transfer of them was under way.

Mechanism: an abort gives the pages back, and the late write lands on their new owner.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with slots that leave during their transfer."""
    sign = case.finding("freed_during_transfer")
    if sign is None:
        return None
    return Judgement(
        score=0.96,
        sentence=f"{place(sign)} {'of ' + reader(sign) + ' ' if sign.request_id >= 0 else ''}changed hands after {when(sign)}: "
        f"it {sign.detail}",
        evidence=(slot_query(sign.group, sign.slot), events_query(sign.evidence)),
        cause_event=sign.evidence[0] if sign.evidence else sign.event,
    )


RULE = Rule(
    kind="abort_frees_during_transfer",
    title="freed during a transfer",
    mechanism="An abort frees pages whose transfer is not over. (S#24527, S#35049)",
    judge=judge,
)
