"""A slot's bytes were damaged within the forward that wrote them.

Mechanism: the pool holds other bytes after the forward than the model handed to the cache in it.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a damaged write."""
    sign = case.finding("write_damaged")
    if sign is None:
        return None
    return Judgement(
        score=0.95,
        sentence=f"what {reader(sign)} wrote to {place(sign)} was damaged within {when(sign)}: {sign.detail}",
        evidence=(slot_query(sign.group, sign.slot), events_query(sign.evidence)),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="kv_write_damaged",
    title="a KV write was damaged",
    mechanism="What a forward leaves in a slot is not what the model handed to the cache. (lab)",
    judge=judge,
)
