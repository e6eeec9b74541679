"""A forward reads other positions than its sliding window's.

Mechanism: where a ring or a window begins is computed wrong, so that attention reads too few positions of it, or some that
have left it. Table and slots stay whole.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, reader, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a read that is not the window's."""
    sign = case.finding("wrong_window")
    if sign is None:
        return None
    return Judgement(
        score=0.95,
        sentence=f"in {when(sign)} {reader(sign)} {sign.detail}",
        evidence=(events_query(sign.evidence),),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="window_read_wrong",
    title="sliding window read wrongly",
    mechanism="A forward reads fewer or more positions of its prefix than the sliding window has. (lab)",
    judge=judge,
    recurs=True,
)
