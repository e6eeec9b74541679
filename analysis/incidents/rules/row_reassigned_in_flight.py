"""A request's row was given to another while a launched forward still read it.

Mechanism: the request is aborted or finished, its row goes to the next one, whose entries stand there when the forward
reads them: the request reads and writes another's slots, for one forward.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, reader, request_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case in which a forward uses a row that has moved on."""
    sign = case.finding("row_reassigned")
    if sign is not None:
        return Judgement(
            score=0.97,
            sentence=f"{reader(sign)} was still being computed in {when(sign)} though it {sign.detail}",
            evidence=(request_query(sign.request_id), events_query(sign.evidence)),
            cause_event=sign.event,
        )
    for other in case.head:
        gone = case.facts.status_before(other.request_id, other.event)
        if other.mode and gone is not None and gone.status in ("aborted", "finished", "retracted"):
            return Judgement(
                score=0.7,
                sentence=f"{reader(other)} was still being computed in {when(other)} after it was {gone.status} in event "
                f"{gone.event}, and read what is not its own",
                evidence=(request_query(other.request_id), events_query([gone.event, other.event])),
                cause_event=other.event,
            )
    return None


RULE = Rule(
    kind="row_reassigned_in_flight",
    title="row reassigned in flight",
    mechanism="A row is freed and given out again while a launched forward still reads it. (S#17850, S#18803)",
    judge=judge,
)
