"""The attention backend's own copy of the block table is not the block table.

Mechanism: a copy of the block table, or the page indices made of it, is overwritten while a forward is in flight. Table
and records stay whole; attention reads another slot at a position of its request.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, reader, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with slots that attention alone got."""
    sign = case.finding("attention_slots")
    if sign is None:
        return None
    alone = all(other.kind.startswith("attention_") for other in case.head)
    return Judgement(
        score=0.96 if alone else 0.5,
        sentence=f"in {when(sign)} attention was given a slot that is not the block table's, at position {sign.position} of "
        f"{reader(sign)}: {sign.detail}",
        evidence=(
            f"select * from attention_slots where event = {sign.event} order by batch_index, position limit 50",
            events_query(sign.evidence),
        ),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="attention_table_overwritten",
    title="attention's own table differs",
    mechanism="The attention backend's copy of the block table is overwritten in flight. (TensorRT-LLM#15546)",
    judge=judge,
    recurs=True,
)
