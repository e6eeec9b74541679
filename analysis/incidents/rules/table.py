"""What went wrong with rows, entries and the full-to-SWA table."""

from ..cluster import Cluster, Diagnosis, events_query, request_query, rule, slot_query
from ..seen.observed import (
    at_the_edge,
    goes_on_in_anothers,
    has_its_row,
    its_own_slot,
    lost_all,
    lower_edge,
    misplaced,
    row_replaced,
    taken_from_behind,
    twice_in_batch,
    wrote_to_padding,
)
from ..sign import CONTENT
from .allocation import named_twice, own_free


@rule("stale table entry", branch="table")
def req_to_token(cluster: Cluster) -> Diagnosis | None:
    """A block-table entry of a running request points to another slot, which was not given to it. (canary)"""
    for other in cluster.head if goes_on_in_anothers(cluster) is None else ():
        stale, there = cluster.gave_up(other), cluster.enough(other) or lost_all(cluster, other)
        went = other.kind == "write_to_foreign_slot" and its_own_slot(cluster, other) is not None  # the row is right
        if other.kind in _FOREIGN and there and not went and (stale or not cluster.was_given(other)):
            why = "which it had given back when it was put back" if stale else "which it was never given"
            held = "slots enough" if cluster.enough(other) else "slots there, and all that it reads is not its own"
            said = (
                f"the table row of {other.reader} names {other.place} in {other.when}, {why}, though it had been given "
            )
            said += f"{held}: it {other.detail}"
            return cluster.diagnosis(0.9, said, other, *other.evidence, cause=other.event)
    twice = next(((s, again) for s in cluster.head if s.bits and (again := named_twice(cluster, s))), None)
    if twice is not None:
        other, (event, position) = twice
        said = f"the table row of {other.reader} names slot {other.slot} for position {other.position} and for position {position}, "
        said += f"which was written over it in event {event}; it had been given slots enough for both, and the row leaves some out: "
        return cluster.diagnosis(0.9, f"{said}read in {other.when}", other, event, cause=event)
    padding = wrote_to_padding(cluster)
    if padding is not None and cluster.enough(padding[0]):
        read, event = padding
        said = f"the table row of {read.reader} names {read.place}, which is kept for padding, though it had been given a slot for that position: "
        return cluster.diagnosis(
            0.85,
            f"{said}it wrote its token there in event {event}, and reads it in {read.when}",
            read,
            event,
            cause=event,
        )
    emptied = cluster.finding("padding_slot_read")
    change = cluster.rewrite_of(emptied) if emptied is not None and not cluster.in_ring(emptied) else None
    if emptied is not None and change is not None:
        said = f"entries of the table row of {emptied.reader} were overwritten before event {change.event}, {change.count} from position "
        said += f"{change.first_position} on, and name {emptied.place} in {emptied.when}: it {emptied.detail}"
        return cluster.diagnosis(0.9, said, emptied, change.event, emptied.event, cause=change.event)
    sign = cluster.violation(CONTENT)
    if sign is None:
        return None
    count = misplaced(cluster, sign)
    if count > 1:
        said = f"{count} entries of the table row of {sign.reader} stand in one another's places in {sign.when}: {sign.place} holds "
        return cluster.diagnosis(0.9, f"{said}position {sign.stored_position}, as the request has it there", sign)
    said = (
        f"the table row of {sign.reader} pointed at {sign.place} in {sign.when}: it holds token {sign.stored_token}, "
    )
    said += f"position {sign.stored_position}, written by {sign.writer}"
    change = cluster.rewrite_of(sign)
    if change is None:
        mine = [other for other in cluster.head if other.request_id == sign.request_id]
        wrong = {other.position for other in mine if other.bits & ~1 & CONTENT}
        return cluster.diagnosis(0.25 if cluster.has_trace else 0.55 if len(wrong) == 1 else 0.3, said, sign)
    given = cluster.last(sign, "alloc") or cluster.last(sign, "shared")
    fresh = given is not None and given.request_id == sign.request_id
    if given is not None and fresh:
        fresh = not cluster.filled_between(sign, given.event, change.event, "written")
    said += f"; the entry was overwritten before event {change.event}"
    return cluster.diagnosis(0.5 if fresh else 0.93, said, sign, change.event, cause=change.event)


@rule("a resumed request's tail was overwritten", branch="table")
def resume_overwrites_tail(cluster: Cluster) -> Diagnosis | None:
    """A resumed request is given slots as if it had none; the tail of its row is replaced. (S#22862)"""
    sign = cluster.finding("hit_never_written", "read_of_foreign_slot") or cluster.violation(CONTENT)
    if sign is None or has_its_row(cluster) is not None:
        return None
    leaked = cluster.kinds["slot_leaked"] > 0
    change = cluster.rewrite_of(sign)
    if change is None:
        if cluster.has_trace or not leaked:
            return None
        said = f"{sign.reader} reads slots that hold nothing of its own: {sign.place}"
        return cluster.diagnosis(0.6, said, sign, queries=())
    given = cluster.last(sign, "alloc")
    if given is None or cluster.filled_between(sign, given.event, change.event, "written"):
        return None
    if row_replaced(cluster, sign):  # no tail
        return None
    said = f"the row of {sign.reader} was overwritten from position {change.first_position} of {change.length} on with slots "
    said += f"given to it in event {given.event}, which hold nothing of it: {sign.place}, read in {sign.when}"
    said += "; the slots that stood there leak" if leaked else ""
    return cluster.diagnosis(0.96 if leaked else 0.92, said, sign, given.event, change.event, cause=change.event)


@rule("row reassigned in flight", branch="table")
def row_reassigned_in_flight(cluster: Cluster) -> Diagnosis | None:
    """A row is freed and given out again while a launched forward still reads it. (S#17850, S#18803)"""
    sign = cluster.finding("row_reassigned")
    if sign is not None and not twice_in_batch(cluster):
        said = f"{sign.reader} was still being computed in {sign.when} though it {sign.detail}"
        queries = (request_query(sign.request_id), events_query(sign.evidence))
        return cluster.diagnosis(0.97, said, sign, queries=queries, cause=sign.event)
    for other in cluster.head:
        own = cluster.facts.strayed.get((other.event, other.request_id))
        if own is not None:
            said = f"{other.reader} was computed in {other.when} on a row that another request of the batch had; its own is row {own}: "
            queries = (request_query(other.request_id), events_query([other.event]))
            return cluster.diagnosis(0.97, said + other.place, other, queries=queries, cause=other.event)
    both = has_its_row(cluster)
    if both is not None:
        said = f"the row of {both.reader} names in {both.when} what another request of the batch writes there for the same positions, "
        return cluster.diagnosis(0.9, f"{said}which had its row by then: {both.place}", both, cause=both.event)
    return None


_FOREIGN = ("write_to_foreign_slot", "read_of_foreign_slot", "read_after_free", "hit_differs")
_THROUGH_A_STALE_ENTRY = (
    *("write_to_foreign_slot", "read_of_foreign_slot", "read_after_free", "foreign_slot_freed", "slot_freed_twice"),
    *("slot_double_allocated", "slot_leaked", "hit_never_written"),
)


@rule("stale full-to-SWA entry", branch="table")
def stale_swa_mapping(cluster: Cluster) -> Diagnosis | None:
    """A page keeps its full-to-SWA entry over its recycling, so that two pages lead to one half. (S#27586, S#25805)"""
    changes = "select * from lut_changes order by event limit 100"
    shared = next((s for s in cluster.signs if s.cause == "swa_slot_shared"), None)
    if shared is not None and shared.event == cluster.first.event:
        said = f"a stale full-to-SWA entry: for {shared.reader} in {shared.when} {shared.detail}"
        return cluster.diagnosis(0.96, said, shared, queries=(*cluster.evidence(shared), changes))
    if not all(cluster.is_sliding(sign) for sign in cluster.head):
        return None
    sign = cluster.finding(*_THROUGH_A_STALE_ENTRY) or cluster.first
    given = cluster.last(sign, "alloc")
    since = given.event if given is not None else -1
    full_slots = {fact.via for fact in cluster.history(sign) if fact.what == "written" and fact.event >= since}
    score = 0.6 if any(group.lut < 0 for group in cluster.groups) else 0.45
    score += 0.2 if sign.kind in _THROUGH_A_STALE_ENTRY else 0
    score += 0.1 if len(full_slots) > 1 else 0
    said = f"only the sliding-window group is hit: {sign.place} of {sign.reader} in {sign.when}"
    said += f", it {sign.detail}" if sign.detail else ""
    said += "; the full-to-SWA table leads somewhere stale"
    return cluster.diagnosis(score, said, sign, queries=(*cluster.evidence(sign), changes))


@rule("sliding-window slot given back too early", branch="allocation", aftermath=True)
def swa_window_off_by_one(cluster: Cluster) -> Diagnosis | None:
    """The window's lower end is computed too high, and a page that is still read freed. (V#47728, S#29860)"""
    missing = next((s for s in cluster.head if s.cause == "swa_slot_missing"), None)
    if missing is not None and not taken_from_behind(cluster, missing):
        said = f"{missing.reader} needed {missing.place} in {missing.when}, inside the sliding window, and its sliding-window "
        queries = (slot_query(missing.group, missing.slot), events_query([missing.event]))
        score = 0.95 if at_the_edge(cluster, missing) else 0.5
        return cluster.diagnosis(score, f"{said}slot was gone", missing, queries=queries, cause=missing.event)
    for sign in (s for s in cluster.head if s.position >= 0):
        freed = own_free(cluster, sign)
        placeholder = sign.bits & CONTENT and sign.writer_event < 0 and not cluster.was_given(sign)
        if (freed is None and not placeholder) or not lower_edge(cluster, sign):
            continue
        gone = f"was given back in event {freed.event}" if freed is not None else "is gone"
        said = f"{sign.reader} reads position {sign.position} in {sign.when}, inside its window of {cluster.window(sign)}, and its "
        said += f"slot {gone}: {sign.place}"
        events = [sign.event, *([freed.event] if freed is not None else [])]
        return cluster.diagnosis(0.92, said, sign, *events, cause=events[-1])
    return None
