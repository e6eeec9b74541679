"""A load that failed was taken for done.

Mechanism: slots are read that a failed transfer, or a load from the host tier, should have filled, and they hold what
was there before.
"""

from ..case import CONTENT, KV_HASH, Case, Judgement, Rule
from ..words import events_query, place, reader, slot_query, when


def judge(case: Case) -> Judgement | None:
    """Score a case whose slots were to be filled by a load."""
    for sign in case.head:
        if sign.kind not in ("hit_never_written", "hit_differs") and not sign.bits & (CONTENT | KV_HASH):
            continue
        given = case.last(sign, ["alloc"])
        failed, loaded = case.last(sign, ["receive_failed"]), case.last(sign, ["loaded"])
        load = failed or loaded
        if load is None or (given is not None and given.event > load.event):
            continue
        since = [f for f in case.history(sign) if f.event > load.event and f.what in ("changed", "written")]
        if since and (since[0].what == "written" or since[-1].what == "written"):
            continue
        # What was never loaded is seen as a change of the whole page; a flipped byte is one slot's.
        whole = not since or since[0].together > 1 or max(1, case.groups[0].page_size) == 1
        return Judgement(
            score=0.94 if failed is not None else 0.91 if whole else 0.55,
            sentence=f"{reader(sign)} read {place(sign)} in {when(sign)} as loaded in event {load.event}, "
            + ("whose transfer failed" if failed is not None else "and it holds something else"),
            evidence=(slot_query(case.group(sign), sign.slot), events_query([load.event, sign.event])),
            cause_event=load.event,
        )
    return None


RULE = Rule(
    kind="failed_load_counted_loaded",
    title="a failed load was taken for done",
    mechanism="A load-back or transfer fails and is counted as loaded. (dynamo#15079)",
    judge=judge,
    recurs=True,
)
