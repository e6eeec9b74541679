"""Attention gets another sequence or query length than the request has.

Mechanism: the lengths of the attention metadata are built apart from the batch: without the cached prefix, from an older
state, or one off. K and V stay whole; some are not read, or too many are.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, reader, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a length that attention got."""
    sign = case.finding("attention_lens")
    if sign is None:
        return None
    return Judgement(
        score=0.9,
        sentence=f"in {when(sign)} attention got a wrong length of {reader(sign)}: {sign.detail}",
        evidence=(
            (
                "select forward, request_id, prefix_len, extend_len, attention_seq_len, attention_query_len "
                f"from forward_requests where event = {sign.event}"
            ),
            events_query(sign.evidence),
        ),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="attention_seq_len_wrong",
    title="attention's length is wrong",
    mechanism="The sequence length that attention gets is not the request's: its cached prefix is left out, or it is stale or one off. (V#46460)",
    judge=judge,
    recurs=True,
)
