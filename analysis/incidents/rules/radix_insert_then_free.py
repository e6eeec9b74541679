"""Pages that the prefix cache had taken over were freed by a retraction or an abort.

Mechanism: a request that leaves gives back slots that it had handed to the prefix cache; the next hit reads another's KV.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a request that frees what the cache holds."""
    sign = case.finding("foreign_slot_freed")
    joined = case.finding("free_slot_shared")
    if sign is None and joined is not None:
        return Judgement(
            score=0.6,
            sentence=f"{reader(joined)} joined {place(joined)} after {when(joined)}: it {joined.detail}",
            evidence=(slot_query(joined.group, joined.slot), events_query(joined.evidence)),
            cause_event=joined.event,
        )
    if sign is None or sign.request_id < 0:
        return None
    left = case.facts.status_after(sign.request_id, sign.event)
    of_cache = sign.cause == "held_by_cache"
    held = case.last(sign, ["cached", "alloc", "shared"], before=sign.event)
    if held is not None:
        of_cache = held.what in ("cached", "shared") or held.request_id < 0
    score = 0.93 if of_cache else 0.45
    if case.has_trace and (left is None or left.status == "admitted"):
        score -= 0.2
    if case.is_sliding(sign) and any(g.lut < 0 for g in case.groups):
        score -= 0.1
    how = f" when it was {left.status}" if left is not None and left.status != "admitted" else ""
    return Judgement(
        score=score,
        sentence=f"{reader(sign)} gave back {place(sign)}{how} after {when(sign)}: it {sign.detail}",
        evidence=(slot_query(sign.group, sign.slot), events_query(sign.evidence)),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="radix_insert_then_free",
    title="freed under the prefix cache",
    mechanism="Pages are inserted in the prefix cache and then freed by a retraction or an abort. (S#38319)",
    judge=judge,
)
