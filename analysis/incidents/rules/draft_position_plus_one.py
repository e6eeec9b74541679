"""The draft model is given positions that are off.

Mechanism: the draft runner's decodes write a position that is not the block table's, by the same distance each time.
"""

from ..case import WRITE_POSITION, Case, Judgement, Rule
from ..words import place, reader, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with wrong positions fed."""
    sign = case.violation(WRITE_POSITION)
    if sign is None:
        return None
    off = {s.stored_position - s.position for s in case.head if s.bits & WRITE_POSITION}
    content = any(s.kind or s.bits & ~WRITE_POSITION for s in case.head)
    distance = sign.stored_position - sign.position
    if len(off) != 1 or abs(distance) != 1 or content:
        return None
    draft = sign.runner > 0
    return Judgement(
        score=0.95 if draft else 0.75,
        sentence=f"the {'draft' if draft else 'model'} was fed position {sign.stored_position} for position {sign.position} of "
        f"{reader(sign)} in {when(sign)}: {place(sign)}, off by {distance:+d}",
        evidence=(
            (
                "select forward, request_id, table_position, position, token from tokens where position <> table_position "
                "order by event limit 50"
            ),
        ),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="draft_position_plus_one",
    title="positions off by one",
    mechanism="The draft's positions are built one too high. (S#25015)",
    judge=judge,
    recurs=True,
)
