"""What went wrong with who holds which slot."""

from ..cluster import CONTENT, Cluster, Diagnosis, Sign, rule
from ..facts import Fact

_LOST_SLOT = ("read_after_free", "read_of_foreign_slot", "write_to_foreign_slot", "hit_never_written")
_EVICTED = ("read_after_free", "read_of_foreign_slot", "hit_never_written", "foreign_slot_freed", "hit_differs")


@rule("a page was given back twice", "A page enters the free list twice and later has two owners. (lab)")
def double_free(cluster: Cluster) -> Diagnosis | None:
    """Score a second free."""
    sign = cluster.finding("slot_freed_twice", anywhere=True)
    if sign is None:
        return None
    score = 0.93 if sign.event == cluster.first.event else 0.5
    score -= 0.15 if cluster.is_sliding(sign) else 0
    score -= 0 if sign.request_id >= 0 else 0.1
    who = sign.reader if sign.request_id >= 0 else "the prefix cache"
    said = f"{who} gave back {sign.place} after {sign.when}: it {sign.detail}"
    return cluster.diagnosis(score, said, sign, *sign.evidence, cause=sign.event)


@rule("a held page was given out", "The allocator hands out a page that is not free. (lab)")
def page_given_twice(cluster: Cluster) -> Diagnosis | None:
    """Score an allocation that names a slot which another request was given and never gave back."""
    sign = cluster.finding("slot_double_allocated")
    if sign is not None:
        said = f"{sign.place} was given to {sign.reader} after {sign.when}: it {sign.detail}"
        return cluster.diagnosis(0.93, said, sign, *sign.evidence, cause=sign.event)
    full_group = any(group.lut < 0 and group.table == 0 for group in cluster.groups)
    for other in cluster.head:
        # If only sliding-window slots are in events, a held full page shows by getting a second half.
        moved = cluster.last(other, "remapped")
        if moved is not None and not full_group:
            said = f"the page of full slot {moved.via} was given out again in event {moved.event} while it was held; "
            said += f"{other.reader} read {other.place} in {other.when}"
            return cluster.diagnosis(0.64, said, other, moved.event, other.event, cause=moved.event)
    for other in cluster.head:
        again = given_to_another(cluster, other)
        if again is not None:
            said = f"{other.place} was given out again in event {again.event} while {other.reader} held it; read in {other.when}"
            return cluster.diagnosis(0.58, said, other, again.event, other.event, cause=again.event)
    wrong = cluster.violation(CONTENT)
    # The same slot at two positions of one request: the allocator gave it out twice to the same one.
    if wrong is None or not wrong.writer_request_id == wrong.request_id >= 0 or wrong.stored_position == wrong.position:
        return None
    said = f"{wrong.reader} has {wrong.place} at position {wrong.stored_position} too, where it wrote it in forward "
    said += f"{wrong.writer_forward}: the page was given to it twice"
    return cluster.diagnosis(0.6, said, wrong)


@rule("a page leaked", "A request leaves and does not give back all it held. (lab)", aftermath=True)
def page_leaked(cluster: Cluster) -> Diagnosis | None:
    """Score a slot that is still held in the name of a request that is gone, while nothing else is wrong."""
    sign = cluster.finding("slot_leaked")
    if sign is None:
        return None
    alone = set(cluster.kinds) == {"slot_leaked"} and not cluster.reasons
    said = f"{sign.place} leaked after {sign.when}: {sign.detail} ({sign.reader})"
    return cluster.diagnosis(0.93 if alone else 0.55, said, sign, *sign.evidence, cause=sign.event)


@rule(
    "a page was given back too early",
    "A page is freed while its request still runs; the next owner writes over it. (lab)",
)
def free_too_early(cluster: Cluster) -> Diagnosis | None:
    """Score a free, by the very request that still reads the slot, before somebody else got it or read it free."""
    joined = cluster.finding("free_slot_shared")
    if joined is not None:
        freed = cluster.last(joined, "free", "evict")
        left = None if freed is None else cluster.facts.status_after(freed.request_id, freed.event)
        if freed is None or freed.what != "free" or (left is not None and left.event <= joined.event):
            return None
        said = f"{joined.place} was given back in event {freed.event} by a request that ran on, and joined by "
        said += f"{joined.reader} after {joined.when}: it {joined.detail}"
        return cluster.diagnosis(0.9, said, joined, *joined.evidence, cause=freed.event)
    signs = [sign for sign in cluster.head if sign.kind in _LOST_SLOT or sign.bits]
    for sign in signs:
        freed = own_free(cluster, sign)
        if freed is not None:
            score = 0.9 if not cluster.is_sliding(sign) else 0.85
            said = f"{sign.reader} gave back {sign.place} in event {freed.event} and went on using it in {sign.when}"
            return cluster.diagnosis(score, said, sign, freed.event, sign.event, cause=freed.event)
    for sign in signs:
        other = given_to_another(cluster, sign)
        if other is not None:
            said = f"{sign.place} was given out again in event {other.event} while {sign.reader} went on using it, in "
            said += f"{sign.when}; the trace does not say who gave it back"
            return cluster.diagnosis(0.62, said, sign, other.event, sign.event, cause=other.event)
    first = cluster.finding("read_after_free", "read_of_foreign_slot")
    if first is None:
        return None
    said = f"{first.reader} read {first.place} in {first.when}, which it no longer holds: it {first.detail}"
    return cluster.diagnosis(0.5 if not cluster.has_trace else 0.35, said, first)


@rule(
    "freed under the prefix cache",
    "Pages are inserted in the prefix cache and then freed by a retraction or an abort. (S#38319)",
)
def radix_insert_then_free(cluster: Cluster) -> Diagnosis | None:
    """Score a request that leaves and gives back what it had handed to the prefix cache; the next hit reads another's KV."""
    sign, joined = cluster.finding("foreign_slot_freed"), cluster.finding("free_slot_shared")
    if sign is None and joined is not None:
        said = f"{joined.reader} joined {joined.place} after {joined.when}: it {joined.detail}"
        return cluster.diagnosis(0.6, said, joined, *joined.evidence, cause=joined.event)
    if sign is None or sign.request_id < 0:
        return None
    left = cluster.facts.status_after(sign.request_id, sign.event)
    of_cache = sign.cause == "held_by_cache"
    held = cluster.last(sign, "cached", "alloc", "shared", before=sign.event)
    if held is not None:
        of_cache = held.what in ("cached", "shared") or held.request_id < 0
    score = 0.93 if of_cache else 0.45
    score -= 0.2 if cluster.has_trace and (left is None or left.status == "admitted") else 0
    score -= 0.1 if cluster.is_sliding(sign) and any(g.lut < 0 for g in cluster.groups) else 0
    how = f" when it was {left.status}" if left is not None and left.status != "admitted" else ""
    said = f"{sign.reader} gave back {sign.place}{how} after {sign.when}: it {sign.detail}"
    return cluster.diagnosis(score, said, sign, *sign.evidence, cause=sign.event)


@rule(
    "evicted under a running request", "The prefix cache gives back a page that is locked by a running request. (lab)"
)
def eviction_of_locked_page(cluster: Cluster) -> Diagnosis | None:
    """Score an eviction of a slot after its reader had joined it and before it read it again."""
    for sign in cluster.head:
        if sign.slot <= 0 or (sign.kind not in _EVICTED and not sign.bits) or sign.request_id < 0:
            continue
        evicted, held = taken_away(cluster, sign, "evict")
        begin = cluster.facts.begins.get(sign.request_id)
        admitted = cluster.facts.status_before(sign.request_id, sign.event)
        if evicted is None or begin is None or begin.event > evicted.event:
            continue
        if admitted is not None and admitted.event > evicted.event:
            continue
        said = f"the prefix cache evicted {sign.place} in event {evicted.event} under {sign.reader}, which read it in {sign.when}"
        return cluster.diagnosis(0.9 if held else 0.72, said, sign, evicted.event, sign.event, cause=evicted.event)
    return None


def own_free(cluster: Cluster, sign: Sign) -> Fact | None:
    """Return the free by which a running request lost the slot that it uses, None if it was not its own doing."""
    if sign.request_id < 0 or sign.slot <= 0:
        return None
    freed, _ = taken_away(cluster, sign, "free")
    if freed is None or freed.request_id != sign.request_id:
        return None
    left = cluster.facts.status_after(sign.request_id, freed.event)
    return None if left is not None and left.event <= sign.event else freed


def given_to_another(cluster: Cluster, sign: Sign) -> Fact | None:
    """Return the allocation of a sign's slot to another, while its request ran, if frees need not be in the trace."""
    if sign.request_id < 0 or not cluster.has_trace or cluster.complete:
        return None
    mine, other = False, None
    for fact in cluster.history(sign):
        if fact.what == "alloc" and fact.request_id == sign.request_id:
            mine, other = True, None
        elif fact.what == "alloc" and mine:
            other = fact
    return other


def taken_away(cluster: Cluster, sign: Sign, what: str) -> tuple[Fact | None, bool]:
    """Return the last free or eviction of a sign's slot, None if its request was given the slot since.

    And whether the request is known to have held it in its present life. A request that lost a slot while it ran, and
    reads it still for its old position, was not helped by being given it anew.
    """
    continues = sign.kind == "read_of_foreign_slot"
    admitted = cluster.facts.status_before(sign.request_id, sign.event)
    taken, held = None, False
    for fact in cluster.history(sign):
        if fact.what == what:
            taken = fact
        elif fact.what in ("alloc", "shared", "cached") and fact.request_id == sign.request_id:
            if not (continues and held):
                taken = None
            held = admitted is None or fact.event > admitted.event
    return taken, held
