"""A resumed request was fed a stale token.

Mechanism: a request was put back and taken up again, and the token it is fed is not the one sampled for it last.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, request_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a wrong input of the target model."""
    sign = case.finding("input_not_truth", "input_not_sampled")
    if sign is None or sign.runner != 0 or case.finding("seq_len_backwards") is not None:
        return None
    resumed = case.facts.retracted_before(sign.request_id, sign.event)
    alone = len({s.request_id for s in case.head if s.kind in ("input_not_truth", "input_not_sampled")}) == 1
    score = (0.95 if alone else 0.75) if resumed else 0.55 if alone else 0.4
    return Judgement(
        score=score,
        sentence=f"{reader(sign)}{', which had been put back and resumed,' if resumed else ''} was fed a stale token in "
        f"{when(sign)}: {place(sign)}, it {sign.detail}",
        evidence=(request_query(sign.request_id), events_query([sign.event, *sign.evidence])),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="async_resume_wrong_input",
    title="a resumed request got a stale token",
    mechanism="With asynchronous preemption a resumed request is fed ids from before. (V#26385)",
    judge=judge,
)
