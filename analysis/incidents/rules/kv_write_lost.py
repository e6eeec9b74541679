"""A forward's KV write did not happen: the slot keeps what another token had left there.

Mechanism: the record is written, the bytes are still, byte for byte, those of the token before.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a lost write."""
    sign = case.finding("write_lost")
    if sign is None:
        return None
    return Judgement(
        score=0.95,
        sentence=f"the KV write of {reader(sign)} to {place(sign)} in {when(sign)} was lost: it {sign.detail}",
        evidence=(slot_query(sign.group, sign.slot), events_query(sign.evidence)),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="kv_write_lost",
    title="a KV write was lost",
    mechanism="A token is written and its slot's bytes are still another token's, written before. (lab)",
    judge=judge,
)
