"""More was committed than was allocated: a request's slots go on into its neighbour's page, or behind the pool.

Mechanism: a request writes a slot that it was never given, and whose holder has had it all along; no free and no
allocation comes in between.
"""

from ..case import Case, Judgement, Rule, Sign
from ..words import events_query, place, reader, slot_query, when
from .free_too_early import own_free


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with slots that there are not, or a write into a page that was never the writer's."""
    outside = case.finding("slot_out_of_pool")
    if outside is not None:
        return Judgement(
            score=0.9,
            sentence=f"{place(outside)} is none of the pool's: after {when(outside)}, of {reader(outside)}, {outside.detail}",
            evidence=(events_query(outside.evidence or [outside.event]),),
            cause_event=outside.event,
        )
    for sign in case.head:
        if sign.kind != "write_to_foreign_slot" or sign.request_id < 0:
            continue
        given = case.last(sign, ["alloc", "shared", "cached"])
        if case.has_trace and (given is None or given.request_id == sign.request_id):
            continue
        if own_free(case, sign) is not None or (given is not None and _has_a_share(case, sign, given.event)):
            continue
        begins = not case.groups or sign.position % max(1, case.groups[0].page_size) == 0
        score = (0.9 if begins else 0.7) if case.has_trace else 0.5
        return Judgement(
            score=score,
            sentence=f"{reader(sign)} wrote {place(sign)} in {when(sign)}, which it was never given: it {sign.detail}",
            evidence=(
                slot_query(case.group(sign), sign.slot),
                events_query([sign.event, *([given.event] if given is not None else [])]),
            ),
            cause_event=sign.event,
        )
    return None


def _has_a_share(case: Case, sign: Sign, since: int) -> bool:
    """Whether the writer had joined the slot, or comes to a sliding-window slot through another full slot."""
    alloc = case.last(sign, ["alloc"])
    history = [fact for fact in case.history(sign) if fact.event >= (alloc.event if alloc is not None else since)]
    joined = any(fact.what == "shared" and fact.request_id == sign.request_id for fact in history)
    return joined or len({fact.via for fact in history if fact.what == "written"}) > 1


RULE = Rule(
    kind="commit_beyond_allocation",
    title="committed beyond its allocation",
    mechanism="A request counts slots as its own that no allocation gave it, and writes into the next page's owner. "
    "(S#28754)",
    judge=judge,
)
