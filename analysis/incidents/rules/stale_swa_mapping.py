"""A recycled slot kept its old full-to-SWA entry.

Mechanism: two full slots lead to one sliding-window slot; what is freed, read or written through the stale entry is
another's. The damage lies in the sliding-window group, the full group is whole.
"""

from ..case import Case, Judgement, Rule
from ..words import place, reader, slot_query, when

_KINDS = (
    "write_to_foreign_slot",
    "read_of_foreign_slot",
    "read_after_free",
    "foreign_slot_freed",
    "slot_freed_twice",
    "slot_double_allocated",
    "slot_leaked",
    "hit_never_written",
)


def judge(case: Case) -> Judgement | None:
    """Score a case that shows the shared entry itself, or foreign slots of the sliding-window group alone."""
    shared = next((s for s in case.signs if s.cause == "swa_slot_shared"), None)
    evidence = ("select * from lut_changes order by event limit 100",)
    if shared is not None and shared.event == case.first.event:
        return Judgement(
            score=0.96,
            sentence=f"a stale full-to-SWA entry: for {reader(shared)} in {when(shared)} {shared.detail}",
            evidence=(slot_query(shared.group, shared.slot), *evidence),
        )
    if not all(case.is_sliding(sign) for sign in case.head) or case.first.kind.startswith("transfer_"):
        return None
    sign = next((sign for sign in case.head if sign.kind in _KINDS), case.first)
    given = case.last(sign, ["alloc"])
    since = given.event if given is not None else -1
    ways = {fact.via for fact in case.history(sign) if fact.what == "written" and fact.event >= since}
    own_full_group = any(group.lut < 0 for group in case.groups)
    score = 0.6 if own_full_group else 0.45
    if sign.kind in _KINDS:
        score += 0.2
    if len(ways) > 1:
        score += 0.1
    if shared is not None:
        score += 0.05
    return Judgement(
        score=score,
        sentence=f"only the sliding-window group is hit: {place(sign)} of {reader(sign)} in {when(sign)}"
        + (f", it {sign.detail}" if sign.detail else "")
        + "; the full-to-SWA table leads somewhere stale",
        evidence=(slot_query(case.group(sign), sign.slot), *evidence),
    )


RULE = Rule(
    kind="stale_swa_mapping",
    title="stale full-to-SWA entry",
    mechanism="A page keeps its full-to-SWA entry over its recycling, so that two pages lead to one half. (S#27586, S#25805)",
    judge=judge,
    recurs=True,
)
