"""Tokens were written to other slots than their row of the block table names.

Mechanism: what says where a forward's tokens go (out_cache_loc, a slot mapping) is worked out beside the block table, and
is off: by one, of the step before, or one slot for two tokens. Attention reads the slot that the row names.
"""

from ..case import Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a token in a slot that is not its row's, or with two tokens in one."""
    sign = case.finding("table_entry_differs", "slot_written_twice", "padding_slot_read")
    if sign is None or case.finding("slot_double_allocated", anywhere=True) is not None:
        return None
    reads = sign.kind == "padding_slot_read"
    what = "reads" if reads else "wrote a token to"
    return Judgement(
        score=0.6 if reads else 0.95,
        sentence=f"in {when(sign)} {reader(sign)} {what} {place(sign)}: {sign.detail}",
        evidence=(slot_query(case.group(sign), sign.slot), events_query(sign.evidence)),
        cause_event=sign.event,
    )


RULE = Rule(
    kind="slot_mapping",
    title="tokens written to the wrong slots",
    mechanism="The slots that a forward writes are not those that its rows name. (lab)",
    judge=judge,
    recurs=True,
)
