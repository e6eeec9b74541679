"""A transfer's stride was wrong: part of it landed beside its pages.

Mechanism: a transfer ends well, some of its slots hold other bytes than were sent, and neighbours change without a write.
"""

from ..case import Case, Judgement, Rule
from ..words import place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case that begins with a transfer that arrived differently."""
    sign = case.finding("transfer_differs")
    if sign is None:
        return _beside(case)
    source = case.finding("transfer_source_damaged", "transfer_source_changed")
    return Judgement(
        score=0.92 if source is None else 0.4,
        sentence=f"a transfer to {reader(sign)} arrived wrong after {when(sign)}, first in {place(sign)}: {sign.detail}",
        evidence=(
            slot_query(sign.group, sign.slot),
            f"select * from transfers where request_id = {sign.request_id} order by event",
        ),
        cause_event=sign.event,
    )


def _beside(case: Case) -> Judgement | None:
    """A slot that took what a transfer should have brought to another."""
    sign = case.only_kv_hash()
    change = case.last(sign, ["changed"]) if sign is not None else None
    if sign is None or change is None or change.twin_kind != "transfer":
        return None
    return Judgement(
        score=0.8,
        sentence=f"{place(sign)} of {reader(sign)} took the bytes that a transfer brought to slot {change.twin[1]} in event "
        f"{change.twin_event}; read in {when(sign)}",
        evidence=(slot_query(case.group(sign), sign.slot), slot_query(case.group(sign), change.twin[1])),
        follows_event=change.twin_event,
    )


RULE = Rule(
    kind="transfer_wrong_stride",
    title="a transfer landed wrong",
    mechanism="A descriptor's stride is wrong, so that part of a transfer overwrites the neighbours. (V#54272)",
    judge=judge,
)
