"""Two pool groups map to overlapping bytes: what one writes changes the other.

Mechanism: KV bytes of a slot change without a write, and the new bytes are those of a token that another pool group's
slot was given at that time. It comes back with every write there.
"""

from ..case import Case, Judgement, Rule
from ..words import place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case of wrong KV bytes whose twin is a write of another group."""
    sign = case.only_kv_hash()
    if sign is None or (case.has_trace and len(case.groups) < 2):
        return None
    for other in case.head:
        change = case.last(other, ["changed"])
        if change is not None and change.twin[0] not in (-1, case.group(other)):
            of_group, of_slot = change.twin
            return Judgement(
                score=0.95,
                sentence=f"pool groups {case.group(other)} and {of_group} share memory: {place(other)} took the bytes that "
                f"were written to slot {of_slot} of group {of_group} in event {change.event}; {reader(other)} read them "
                f"in {when(other)}",
                evidence=(slot_query(case.group(other), other.slot), slot_query(of_group, of_slot)),
                cause_event=change.event,
            )
    slots = {(case.group(other), other.slot) for other in case.head}
    if len(slots) < 2:
        return Judgement(
            score=0.3,
            sentence=f"{place(sign)} may share memory with a slot of another pool group, written at the same time",
        )
    return Judgement(
        score=0.5,
        sentence=f"KV bytes of {len(slots)} slots changed together, first {place(sign)}: perhaps another pool group maps to "
        "the same memory",
        evidence=(slot_query(case.group(sign), sign.slot),),
    )


RULE = Rule(
    kind="groups_alias",
    title="pool groups share memory",
    mechanism="Two groups' buffers overlap, so that a write in one changes the other's bytes: the change has a twin, the "
    "same bytes written in the other group. (V#41657)",
    judge=judge,
    recurs=True,
)
