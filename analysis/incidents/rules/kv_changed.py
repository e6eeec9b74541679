"""KV bytes changed without a write: a flipped bit, or somebody who writes where it should not.

Mechanism: the record of a slot is right, its chain, token and position too, and only the hash of its KV bytes is not
the one written. One slot at a time, and no write of this trace has those bytes. The canary's own three perturbations of
a used slot, a cached one, and one right after its forward end here: what was flipped when, nobody can tell from outside.
"""

from ..case import Case, Judgement, Rule
from ..words import place, reader, slot_query, when, writer


def judge(case: Case) -> Judgement | None:
    """Score a case whose first signs are wrong KV bytes alone."""
    damaged = case.finding("transfer_source_damaged", "transfer_source_changed")
    if damaged is not None and all(
        sign.kind == damaged.kind or sign.kind.startswith("transfer_") for sign in case.head
    ):
        return Judgement(
            score=0.85,
            sentence=f"KV bytes changed on the prefill side: {place(damaged)} of {reader(damaged)} no longer held what had "
            f"been written when it was sent, before {when(damaged)}",
            evidence=(slot_query(case.group(damaged), damaged.slot),),
        )
    sign = case.only_kv_hash()
    if sign is None:
        return None
    change = case.last(sign, ["changed"])
    slots = {(case.group(other), other.slot) for other in case.head}
    score = 0.9 if len(slots) == 1 else 0.72
    noticed = ""
    if change is not None:
        noticed = f"; the change was seen in event {change.event}"
        if change.twin != (-1, -1):
            score -= 0.25
            noticed += f", with the bytes written to slot {change.twin[1]} in event {change.twin_event}"
        if change.together > 1:
            score -= 0.08
    elif case.has_trace:
        score -= 0.1
    return Judgement(
        score=score,
        sentence=f"KV bytes of {place(sign)} changed without a write, first read in {when(sign)} by {reader(sign)}; written "
        f"last by {writer(sign)}{noticed}",
        evidence=(slot_query(case.group(sign), sign.slot),),
        cause_event=-1 if change is None else change.event,
        follows_event=-1 if change is None else change.twin_event,
    )


RULE = Rule(
    kind="kv_changed",
    title="KV bytes changed without a write",
    mechanism="A byte of a slot changes between its write and its read. The record is right, the KV hash alone is not, and "
    "no write of the trace holds these bytes. (canary: kv_used, kv_unused_cache, kv_post_forward)",
    judge=judge,
)
