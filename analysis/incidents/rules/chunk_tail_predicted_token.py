"""At the end of a prompt's chunk the draft was fed the predicted token instead of the prompt's.

Mechanism: the draft reads one token ahead; at a chunk's end the next token is the prompt's, not what the target predicts.
"""

from ..case import Case, Judgement, Rule
from ..words import place, reader, request_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a draft that is fed what the scheduler does not have."""
    sign = case.finding("input_not_truth")
    if sign is None or sign.runner == 0:
        return None
    return Judgement(
        score=0.95 if sign.mode in ("extend", "draft_extend", "mixed") else 0.7,
        sentence=f"the draft model of {reader(sign)} was fed a wrong token at the end of a chunk in {when(sign)}: {place(sign)}, "
        f"it {sign.detail}",
        evidence=(
            request_query(sign.request_id),
            f"select * from chunks where request_id = {sign.request_id} order by event",
        ),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="chunk_tail_predicted_token",
    title="a chunk's tail got the predicted token",
    mechanism="With speculative decoding the last draft input of a prompt's chunk is the target's prediction. (S#26800)",
    judge=judge,
    recurs=True,
)
