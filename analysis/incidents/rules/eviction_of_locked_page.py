"""The prefix cache evicted a page that a running request stands on.

Mechanism: the last thing that took the slot from its readers is an eviction, after the request had joined it and before
it read it again.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when
from .free_too_early import taken_away

_KINDS = ("read_after_free", "read_of_foreign_slot", "hit_never_written", "foreign_slot_freed", "hit_differs")


def judge(case: Case) -> Judgement | None:
    """Score a case whose slot was evicted under its reader."""
    for sign in case.head:
        if sign.slot <= 0 or (sign.kind not in _KINDS and not sign.bits) or sign.request_id < 0:
            continue
        evicted, held = taken_away(case, sign, "evict")
        begin = case.facts.begins.get(sign.request_id)
        if evicted is None or begin is None or begin.event > evicted.event:
            continue
        admitted = case.facts.status_before(sign.request_id, sign.event)
        if admitted is not None and admitted.event > evicted.event:
            continue
        return Judgement(
            score=0.9 if held else 0.72,
            sentence=f"the prefix cache evicted {place(sign)} in event {evicted.event} under {reader(sign)}, which read it in "
            f"{when(sign)}",
            evidence=(slot_query(case.group(sign), sign.slot), events_query([evicted.event, sign.event])),
            cause_event=evicted.event,
        )
    return None


RULE = Rule(
    kind="eviction_of_locked_page",
    title="evicted under a running request",
    mechanism="The prefix cache gives back a page that is locked by a running request. (lab)",
    judge=judge,
)
