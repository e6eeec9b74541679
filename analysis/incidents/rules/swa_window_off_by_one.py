"""Sliding-window slots are given back one token before they leave the window.

Mechanism: a forward needs a position at the window's edge whose full-to-SWA entry is 0 already; whenever a page
boundary passes.
"""

from ..case import Case, Judgement, Rule, Sign
from ..words import events_query, place, reader, request_query, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with an entry that leads nowhere inside the window."""
    sign = next((s for s in case.head if s.cause == "swa_slot_missing"), None)
    if sign is None:
        return None
    return Judgement(
        score=0.95 if _at_the_edge(case, sign) else 0.5,
        sentence=f"{reader(sign)} needed {place(sign)} in {when(sign)}, inside the sliding window, and its sliding-window slot "
        "was gone",
        evidence=(slot_query(sign.group, sign.slot), events_query([sign.event]), request_query(sign.request_id)),
        cause_event=sign.event,
    )


def _at_the_edge(case: Case, sign: Sign) -> bool:
    """Whether the one position that is missing is the lowest of the window."""
    prefix = case.facts.prefixes.get((sign.event, sign.request_id))
    if prefix is None or not 0 <= sign.group < len(case.groups):
        return not case.has_trace and sign.count == 1
    return sign.count == 1 and abs(sign.position - (prefix - case.groups[sign.group].window)) <= 1


RULE = Rule(
    kind="swa_window_off_by_one",
    title="sliding-window slot given back too early",
    mechanism="The window's lower end is computed one token too high, and its page freed too early. (lab)",
    judge=judge,
    recurs=True,
    aftermath=True,
)
