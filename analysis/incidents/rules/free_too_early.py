"""A running request's page was given back while it goes on reading it.

Mechanism: the last event about the slot, before somebody else got it or read it free, is a free by the very request
that still reads it, and that request did not leave.
"""

from ..case import Case, Judgement, Rule, Sign
from ..facts import Fact
from ..words import events_query, place, reader, slot_query, when

_KINDS = ("read_after_free", "read_of_foreign_slot", "write_to_foreign_slot", "hit_never_written")


def judge(case: Case) -> Judgement | None:
    """Score a case in which a reader lost its slot by its own free."""
    joined = case.finding("free_slot_shared")
    if joined is not None:
        freed = case.last(joined, ["free", "evict"])
        left = None if freed is None else case.facts.status_after(freed.request_id, freed.event)
        if freed is None or freed.what != "free" or (left is not None and left.event <= joined.event):
            return None
        return Judgement(
            score=0.9,
            sentence=f"{place(joined)} was given back in event {freed.event} by a request that ran on, and joined by "
            f"{reader(joined)} after {when(joined)}: it {joined.detail}",
            evidence=(slot_query(case.group(joined), joined.slot), events_query(joined.evidence)),
            cause_event=freed.event,
        )
    signs = [sign for sign in case.head if sign.kind in _KINDS or sign.bits]
    for sign in signs:
        found = _own_free(case, sign)
        if found is not None:
            return found
    for sign in signs:
        other = given_to_another(case, sign)
        if other is not None:
            return Judgement(
                score=0.62,
                sentence=f"{place(sign)} was given out again in event {other.event} while {reader(sign)} went on using it, in "
                f"{when(sign)}; the trace does not tell who gave it back",
                evidence=(slot_query(case.group(sign), sign.slot), events_query([other.event, sign.event])),
                cause_event=other.event,
            )
    first = case.finding("read_after_free", "read_of_foreign_slot")
    if first is None:
        return None
    return Judgement(
        score=0.5 if not case.has_trace else 0.35,
        sentence=f"{reader(first)} read {place(first)} in {when(first)}, which it no longer holds: it {first.detail}",
        evidence=(slot_query(case.group(first), first.slot),),
    )


def own_free(case: Case, sign: Sign) -> Fact | None:
    """Return the free by which a running request lost the slot that it uses, None where it was not its own doing."""
    if sign.request_id < 0 or sign.slot <= 0:
        return None
    freed, _ = taken_away(case, sign, "free")
    if freed is None or freed.request_id != sign.request_id:
        return None
    left = case.facts.status_after(sign.request_id, freed.event)
    return None if left is not None and left.event <= sign.event else freed


def given_to_another(case: Case, sign: Sign) -> Fact | None:
    """Return the allocation of a sign's slot to another, while its request ran, where frees need not be told."""
    if sign.request_id < 0 or not case.has_trace or case.tells_all:
        return None
    mine, other = False, None
    for fact in case.history(sign):
        if fact.what == "alloc" and fact.request_id == sign.request_id:
            mine, other = True, None
        elif fact.what == "alloc" and mine:
            other = fact
    return other


def taken_away(case: Case, sign: Sign, what: str) -> tuple[Fact | None, bool]:
    """Return the last free or eviction of a sign's slot, None where its request was given the slot since.

    And whether the request is known to have held it in its present life.

    A request that lost a slot while it ran, and reads it still for its old position, was not helped by being given it anew.
    """
    goes_on = sign.kind == "read_of_foreign_slot"
    admitted = case.facts.status_before(sign.request_id, sign.event)
    taken, held = None, False
    for fact in case.history(sign):
        if fact.what == what:
            taken = fact
        elif fact.what in ("alloc", "shared", "cached") and fact.request_id == sign.request_id:
            if taken is None or not (goes_on and held):
                taken = None
            held = admitted is None or fact.event > admitted.event
    return taken, held


def _own_free(case: Case, sign: Sign) -> Judgement | None:
    freed = own_free(case, sign)
    if freed is None:
        return None
    return Judgement(
        score=0.9 if not case.is_sliding(sign) else 0.85,
        sentence=f"{reader(sign)} gave back {place(sign)} in event {freed.event} and went on using it in {when(sign)}",
        evidence=(slot_query(case.group(sign), sign.slot), events_query([freed.event, sign.event])),
        cause_event=freed.event,
    )


RULE = Rule(
    kind="free_too_early",
    title="a page was given back too early",
    mechanism="A page is freed while its request still runs; the next owner writes over it. (lab)",
    judge=judge,
)
