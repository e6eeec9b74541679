"""A resumed request overwrote the tail of its row with fresh slots; the old ones leak.

Mechanism: table entries inside what a request has computed are replaced by slots that were just given to it. They hold
nothing of its own, and the slots that stood there are never given back.
"""

from ..case import CONTENT, Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when
from .req_to_token import rewrite_of


def judge(case: Case) -> Judgement | None:
    """Score a case whose content is wrong where the row was rewritten with the request's own fresh slots."""
    sign = case.finding("hit_never_written", "read_of_foreign_slot") or case.violation(CONTENT)
    if sign is None or sign.request_id < 0 or sign.position < 0:
        return None
    change = rewrite_of(case, sign)
    if change is None:
        if not case.has_trace and case.kinds["slot_leaked"] and case.finding("hit_never_written") is not None:
            return Judgement(
                score=0.6, sentence=f"{reader(sign)} reads slots that hold nothing of its own: {place(sign)}"
            )
        return None
    given = case.last(sign, ["alloc", "shared"])
    if given is None or given.request_id != sign.request_id or given.what != "alloc":
        return None
    if any(fact.what == "written" and given.event < fact.event < change.event for fact in case.history(sign)):
        return None
    leaked = case.kinds["slot_leaked"] > 0
    return Judgement(
        score=0.96 if leaked else 0.92,
        sentence=f"the row of {reader(sign)} was overwritten from position {change.first_position} of {change.length} on with "
        f"slots given to it in event {given.event}, which hold nothing of it: {place(sign)}, read in {when(sign)}"
        + ("; the slots that stood there leak" if leaked else ""),
        evidence=(slot_query(case.group(sign), sign.slot), events_query([given.event, change.event])),
        cause_event=change.event,
    )


RULE = Rule(
    kind="resume_overwrites_tail",
    title="a resumed request's tail was overwritten",
    mechanism="A resumed request is given slots as if it had none; the tail of its row is replaced. (S#22862)",
    judge=judge,
)
