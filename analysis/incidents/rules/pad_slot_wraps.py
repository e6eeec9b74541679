"""Padding written to slot -1 landed in the pool's last slot.

Mechanism: KV bytes of the last slot change without a write, in forwards whose padding was told to go nowhere.
"""

from ..case import KV_HASH, Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case of wrong KV bytes in the last slot."""
    sign = next((s for s in case.head if s.bits & KV_HASH), None)
    if sign is None or not 0 <= case.group(sign) < len(case.groups):
        return None
    if sign.slot != case.groups[case.group(sign)].num_slots - 1:
        return None
    change = case.last(sign, ["changed"])
    upto = change.event if change is not None else sign.event
    padded = [event for event in case.facts.padding_nowhere if event <= upto]
    return Judgement(
        score=0.95 if padded else 0.6,
        sentence=f"{place(sign)}, the pool's last, changed without a write, read in {when(sign)} by {reader(sign)}"
        + (f"; the padding of event {padded[-1]} went to slot -1, which is this one" if padded else ""),
        evidence=(slot_query(case.group(sign), sign.slot), events_query(padded[-3:])),
    )


RULE = Rule(
    kind="pad_slot_wraps",
    title="padding wrapped to the last slot",
    mechanism="The padding slot -1 is taken as an index from the end, so that padding overwrites the last slot. (V#43810)",
    judge=judge,
    recurs=True,
)
