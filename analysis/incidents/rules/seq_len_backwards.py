"""A forward was built with the length that its request had a step before.

Mechanism: a request's prefix does not go on where its forward before ended; a token is computed twice, and the slot
behind it is left out.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, reader, request_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a length that went back."""
    sign = case.finding("seq_len_backwards")
    if sign is None:
        return None
    return Judgement(
        score=0.96,
        sentence=f"the length of {reader(sign)} went back in {when(sign)}: it {sign.detail}",
        evidence=(request_query(sign.request_id), events_query(sign.evidence)),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="seq_len_backwards",
    title="a request's length went back",
    mechanism="A decode is built from a stale sequence length. (lab)",
    judge=judge,
)
