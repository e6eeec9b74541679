"""A prefix hit in the very step that is still writing the content.

Mechanism: pages are handed to the prefix cache before they are computed. A request of the same batch, or an equal one,
joins them, and reads what the slots held before.
"""

from ..case import CONTENT, Case, Judgement, Rule, Sign
from ..words import events_query, place, reader, request_query, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case whose slots were the cache's before they were first written."""
    for sign in case.head:
        if sign.kind not in ("write_to_foreign_slot", "hit_never_written", "hit_differs") and not sign.bits & CONTENT:
            continue
        cached, given = case.last(sign, ["cached"]), case.last(sign, ["alloc"])
        if case.has_trace and (cached is None or given is None or cached.event < given.event):
            continue
        if _joined_and_writes(case, sign):
            return Judgement(
                score=0.92,
                sentence=f"{reader(sign)} joined {place(sign)}, which the prefix cache holds, and then computed it again in "
                f"{when(sign)}: it was taken for cached before it was written",
                evidence=(slot_query(case.group(sign), sign.slot), request_query(sign.request_id)),
                cause_event=sign.event,
            )
        prefilling = sign.mode in ("extend", "mixed", "draft_extend")
        if given is not None and cached is not None and _written_between(case, sign, given.event, cached.event):
            continue
        same = sign.cause in ("same_forward", "held_by_cache")
        if (not same or sign.bits) and not case.has_trace:
            continue
        score = 0.5 if not case.has_trace else 0.94 if prefilling else 0.6
        return Judgement(
            score=score,
            sentence=f"{place(sign)} stood in the prefix cache before it was computed; in {when(sign)} {reader(sign)} "
            f"{sign.detail or 'read what had been there before'}",
            evidence=(
                slot_query(case.group(sign), sign.slot),
                events_query([sign.event, *(fact.event for fact in (cached, given) if fact is not None)]),
            ),
            cause_event=cached.event if cached is not None else sign.event,
        )
    return None


def _joined_and_writes(case: Case, sign: Sign) -> bool:
    """Whether a prefill writes a slot that its request had joined as cached."""
    if sign.kind != "write_to_foreign_slot" or sign.mode not in ("extend", "mixed", "draft_extend"):
        return False
    joined = case.last(sign, ["shared"])
    return joined is not None and any(
        fact.what == "shared" and fact.request_id == sign.request_id for fact in case.history(sign)
    )


def _written_between(case: Case, sign: Sign, given: int, cached: int) -> bool:
    filled = ("written", "copied", "loaded", "received")
    return any(fact.what in filled and given < fact.event < cached for fact in case.history(sign))


RULE = Rule(
    kind="hit_before_written",
    title="prefix hit before it was written",
    mechanism="A page is in the prefix cache while its forward has yet to write it. (V#38715)",
    judge=judge,
    recurs=True,
)
