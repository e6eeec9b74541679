"""What went wrong with where tokens were written, and with padding."""

from ..cluster import Cluster, Diagnosis, events_query, rule
from ..facts import Fact
from ..seen.observed import (
    came_to_another,
    given_what_is_cached,
    goes_on_in_anothers,
    its_own_slot,
    kept_nowhere,
    let_in_again,
    over_its_own,
    rest_of_a_lent_page,
    went_elsewhere,
    written_past_its_row,
    wrote_to_padding,
)
from ..sign import CONTENT, KV_HASH, WRITE_POSITION, Sign
from .allocation import own_free

_FEW = 4  # slots that padding changes in one forward


@rule("tokens written to the wrong slots", branch="write")
def slot_mapping(cluster: Cluster) -> Diagnosis | None:
    """The slots that a forward writes are not those that its rows name. (lab)"""
    beside = _beside(cluster)
    if beside is not None:
        return beside
    sign = cluster.finding("table_entry_differs", "slot_written_twice", "padding_slot_read")
    if sign is None:
        return None
    shifted = any(other.bits & WRITE_POSITION and other.request_id == sign.request_id for other in cluster.head)
    twice = sign.kind == "slot_written_twice" and any(o.bits & CONTENT and o.slot == sign.slot for o in cluster.signs)
    reads = sign.kind == "padding_slot_read"
    said = f"in {sign.when} {sign.reader} {'reads' if reads else 'wrote a token to'} {sign.place}: {sign.detail}"
    return cluster.diagnosis(0.6 if reads or shifted or twice else 0.95, said, sign, *sign.evidence, cause=sign.event)


def _beside(cluster: Cluster) -> Diagnosis | None:
    """A token that attention looks for where its row says, or that its request reads there later, and that went elsewhere."""
    strayed = came_to_another(cluster)
    if strayed is not None:
        sign, at = strayed
        said = f"{sign.place} got what the forward of event {at.twin_event} handed in for slot {at.twin[1]}, which did not get it; "
        said += f"read in {sign.when} by {sign.reader}"
        return cluster.diagnosis(0.95, said, sign, at.twin_event, cause=at.twin_event)
    lost = next((s for s in cluster.head if s.kind == "write_lost" or s.cause == "zeros"), None)
    hit = next((s for s in cluster.head if s.bits == KV_HASH and cluster.last(s, "changed") is not None), None)
    if lost is not None and hit is not None:
        said = f"what {lost.reader} wrote to {lost.place} in {lost.when} did not come there: {lost.detail}; and {hit.place} changed, "
        said += "which nobody wrote"
        return cluster.diagnosis(0.75, said, lost, lost.event, cause=lost.event)
    for sign in cluster.head:
        if kept_nowhere(cluster, sign):
            own = cluster.wrote(sign)
            said = f"{sign.reader} reads position {sign.position} of its window in {sign.place} in {sign.when}, and had computed it in event "
            said += f"{own[0] if own else -1}, from where it went to no slot that keeps it"
            return cluster.diagnosis(0.85, said, sign, own[0] if own else -1, sign.event, cause=own[0] if own else -1)
        if sign.kind == "write_to_foreign_slot" and not cluster.was_given(sign):
            found = its_own_slot(cluster, sign)
            if found is not None:
                said = f"{sign.reader} wrote its token for position {sign.position} to {sign.place} in {sign.when}, which it was never "
                row = f"it reads that position in slot {found.slot}, which it had been given"
                said += f"given: it {found.detail}" if found.event == sign.event else f"given: {row}"
                return cluster.diagnosis(0.94, said, sign, sign.event, found.event, cause=sign.event)
        if sign.kind == "attention_slots" and not cluster.in_ring(sign):
            over = over_its_own(cluster, sign) if sign.slot < 0 else None
            if over is not None:
                said = f"the row of {sign.reader} has no slot for position {sign.position} in {sign.when}, and its token was written to "
                said += f"{over.place} all the same, which is the request's own for another position"
                return cluster.diagnosis(0.95, said, over, sign.event, cause=sign.event)
            if went_elsewhere(cluster, sign):
                said = f"in {sign.when} {sign.reader} wrote its token for position {sign.position} elsewhere than its row says: "
                return cluster.diagnosis(0.97, said + sign.detail, sign, *sign.evidence, cause=sign.event)
        elif sign.bits & CONTENT or sign.kind in ("hit_never_written", "hit_differs"):
            own, change = cluster.wrote(sign), cluster.rewrite_of(sign)
            moved = change is not None and own is not None and change.event > own[0]
            moved = moved and not _never_filled_since(cluster, sign, own)
            if own is None or own[1] == sign.slot or moved or not cluster.was_given(sign) or cluster.is_sliding(sign):
                continue
            given = cluster.last(sign, "alloc", "shared")
            if given is not None and given.event <= own[0]:
                said = f"{sign.reader} looks for position {sign.position} in {sign.place} in {sign.when}, which its row names; it had "
                said += f"written it to slot {own[1]} in event {own[0]}"
                return cluster.diagnosis(0.93, said, sign, own[0], sign.event, cause=own[0])
    return None


def _never_filled_since(cluster: Cluster, sign: Sign, own: tuple[int, int] | None) -> bool:
    """Whether a slot was given to its request for a position before that was written, elsewhere, over another of the request's."""
    given = cluster.last(sign, "alloc")
    if own is None or given is None or given.event > own[0] or given.request_id != sign.request_id:
        return False
    there = cluster.facts.of(cluster.group(sign), own[1], upto=own[0])
    twice = [fact.request_id for fact in there if fact.what == "written"].count(sign.request_id) > 1
    return twice and not cluster.filled_between(
        sign, given.event, sign.event, "written", "copied", "loaded", "received"
    )


@rule("a token written into a shared page", branch="write")
def shared_page_written(cluster: Cluster) -> Diagnosis | None:
    """A token is computed into a page that others read: the last one of a prompt that is cached whole, or one that
    a draft model maps to the page. (V#9972, V#42971)
    """
    both = goes_on_in_anothers(cluster)
    if both is not None:
        read, wrote = both
        said = f"{wrote.reader} wrote {wrote.place} in {wrote.when}, behind {read.count} tokens of another request's page, which are its own tokens, too: "
        said += f"it {wrote.detail}"
        return cluster.diagnosis(0.92, said, wrote, *read.evidence, wrote.event, cause=wrote.event)
    for sign in cluster.head:
        empty = _joined_empty(cluster, sign)
        if empty is not None:
            said = f"{empty[0]} shares {sign.place} since event {empty[1].event}, before anything stood there, and both it and whoever "
            said += f"was given the page write it, in {sign.when}: {sign.detail}"
            return cluster.diagnosis(0.93, said, sign, empty[1].event, sign.event, cause=empty[1].event)
        again = let_in_again(cluster, sign)
        if again:
            said = f"{sign.reader} read {sign.place}, which another request wrote in event {again[-1].event}: that was let in on the "
            said += f"page in event {again[0].event} as on a hit, and again in event {again[-2].event}, and was never put back between"
            return cluster.diagnosis(0.85, said, sign, *(fact.event for fact in again), cause=again[-1].event)
        lent = rest_of_a_lent_page(cluster, sign)
        if lent is not None:
            said = f"{sign.reader} read {sign.place} in {sign.when}, where {sign.writer} had written: the page was given to another request in "
            said += f"event {lent.event}, nobody has given it back, and what stands in front of it is as it was"
            return cluster.diagnosis(0.85, said, sign, lent.event, sign.writer_event, cause=sign.writer_event)
        joined = cluster.last(sign, "shared", "cached")
        if sign.kind != "write_to_foreign_slot" or joined is None or joined.request_id != sign.request_id:
            continue
        filled = cluster.last(sign, "written", "copied", "loaded", "received", before=sign.event)
        given = cluster.last(sign, "alloc")
        page = cluster.groups[cluster.group(sign)].page_size if cluster.groups else 1
        if filled is None or (given is not None and filled.event < given.event) or sign.count >= page > 1:
            continue
        if joined.what == "cached" and _own_position(cluster, sign):
            continue  # its own slot, which the cache shares with it: it was to go elsewhere
        if any(o.bits & CONTENT and (cluster.rewrite_of(o) or cluster.gave_up(o)) for o in cluster.head):
            continue  # its row is wrong, and with it the slots that come next
        holder = "it shares" if joined.what == "shared" else "the prefix cache holds"
        said = (
            f"{sign.reader} wrote {sign.place} in {sign.when}, which {holder} since event {joined.event} or before: it "
        )
        score = 0.6 if given_what_is_cached(cluster, sign) else 0.95
        return cluster.diagnosis(score, said + sign.detail, sign, joined.event, sign.event, cause=sign.event)
    return None


def _own_position(cluster: Cluster, sign: Sign) -> bool:
    """Whether a slot that a request writes is its own for another position: it was given it and has written it before."""
    mine = [
        fact.what for fact in cluster.history(sign) if fact.request_id == sign.request_id and fact.event < sign.event
    ]
    again = sign.runner > 0 or (cluster.wrote(sign) or (-1, -1))[1] == sign.slot
    return "alloc" in mine and "written" in mine and "shared" not in mine and not again


def _joined_empty(cluster: Cluster, sign: Sign) -> tuple[str, Fact] | None:
    """A slot that was handed on by whoever had it, before it was filled and not by the cache, and that both have written."""
    history = cluster.history(sign) if sign.kind in ("write_to_foreign_slot", "hit_never_written") else []
    at = max((n for n, fact in enumerate(history) if fact.what == "alloc"), default=-1)
    since = history[at:] if at >= 0 else []
    joined = next((fact for fact in since if fact.what != "alloc"), None)
    if joined is None or joined.what != "shared" or joined.request_id == since[0].request_id:
        return None
    wrote = {fact.request_id for fact in since if fact.what == "written"}
    both = {joined.request_id, since[0].request_id} <= wrote
    return (sign.reader if sign.request_id == joined.request_id else "another request", joined) if both else None


@rule("committed beyond its allocation", branch="allocation")
def commit_beyond_allocation(cluster: Cluster) -> Diagnosis | None:
    """A request counts slots as its own that no allocation gave it, and writes into the next page's owner.
    (S#28754)
    """
    outside = cluster.finding("slot_out_of_pool")
    if outside is not None and not cluster.reads(outside):
        said = f"{outside.place} is none of the pool's: after {outside.when}, of {outside.reader}, {outside.detail}"
        queries = (events_query(outside.evidence or [outside.event]),)
        return cluster.diagnosis(0.9, said, outside, queries=queries, cause=outside.event)
    padding = wrote_to_padding(cluster)
    if padding is not None and cluster.complete and not cluster.enough(padding[0]):
        read, event = padding
        said = f"{read.reader} was given no slot for position {read.position} and wrote its token to {read.place}, which is kept for padding, in "
        return cluster.diagnosis(0.85, f"{said}event {event}; read in {read.when}", read, event, cause=event)
    beyond = written_past_its_row(cluster)
    if beyond is not None:
        row, (event, slot) = beyond
        said = f"{row.reader} wrote slot {slot} for its position {row.position} in event {event}, over what {cluster.first.reader} "
        said += f"reads there in {cluster.first.when}, and its row has no entry for that position: in {row.when} it {row.detail}"
        return cluster.diagnosis(0.85, said, cluster.first, event, row.event, cause=event)
    for sign in cluster.head:
        if sign.kind != "write_to_foreign_slot" or sign.request_id < 0:
            continue
        given = cluster.last(sign, "alloc", "shared", "cached")
        if cluster.has_trace and (
            (given is None and not cluster.complete) or cluster.was_given(sign) or cluster.enough(sign)
        ):
            continue
        if own_free(cluster, sign) is not None or (given is not None and _has_a_share(cluster, sign, given.event)):
            continue
        begins = not cluster.groups or sign.position % max(1, cluster.groups[0].page_size) == 0
        score = 0.5 if not cluster.has_trace else 0.9 if begins else 0.7
        said = f"{sign.reader} wrote {sign.place} in {sign.when}, which it was never given: it {sign.detail}"
        events = [sign.event, given.event] if given is not None else [sign.event]
        return cluster.diagnosis(score, said, sign, *events, cause=sign.event)
    return None


def _has_a_share(cluster: Cluster, sign: Sign, since: int) -> bool:
    """Whether the writer had joined the slot, or comes to a sliding-window slot through another full slot."""
    alloc = cluster.last(sign, "alloc")
    since = alloc.event if alloc is not None else since
    full_slots = {fact.via for fact in cluster.history(sign) if fact.event >= since and fact.what == "written"}
    return cluster.joined(sign, since) or len(full_slots) > 1


@rule("padding wrapped to the last slot", branch="write")
def pad_slot_wraps(cluster: Cluster) -> Diagnosis | None:
    """The padding slot -1 is taken as an index from the end, so that padding overwrites the last slot. (V#43810)"""
    sign = cluster.violation(KV_HASH)
    if sign is None or not 0 <= cluster.group(sign) < len(cluster.groups):
        return None
    if sign.slot != cluster.groups[cluster.group(sign)].num_slots - 1:
        return None
    change = cluster.last(sign, "changed")
    upto = change.event if change is not None else sign.event
    padded = [event for event in cluster.facts.padding_nowhere if event <= upto]
    said = f"{sign.place}, the pool's last, changed without a write, read in {sign.when} by {sign.reader}"
    said += f"; the padding of event {padded[-1]} went to slot -1, which is this one" if padded else ""
    return cluster.diagnosis(0.95 if padded else 0.6, said, sign, *padded[-3:])


def _written_as_beside(cluster: Cluster, sign: Sign, change: Fact) -> bool:
    """Whether a slot that its request had written came to hold what the very forward wrote to one other slot, and few did."""
    group, slot = change.twin
    own = cluster.wrote(sign)
    mine = own is not None and own[0] < change.event
    beside = change.twin_event == change.event and change.twin_kind == "forward" and change.together <= _FEW
    return mine and beside and group == cluster.group(sign) and slot != sign.slot


@rule("padding wrote a live slot", branch="write")
def pad_rows_keep_last_blocks(cluster: Cluster) -> Diagnosis | None:
    """Rows that pad a batch keep the slots that they had a step before. (lmdeploy#4569)"""
    sign = cluster.finding("padded_write")
    if sign is not None:
        said = f"padding of {sign.when} wrote {sign.place}: it {sign.detail}"
        return cluster.diagnosis(0.95, said, sign, *sign.evidence)
    for other in cluster.head:
        padded, given = cluster.last(other, "padded"), cluster.last(other, "alloc")
        if not other.bits & KV_HASH:
            continue
        if padded is None:
            change = cluster.last(other, "changed")
            if change is not None and _written_as_beside(cluster, other, change):
                said = f"{other.place}, which {other.reader} read in {other.when}, got in event {change.event} what that forward wrote to slot "
                said += f"{change.twin[1]}, as if a row behind its batch had written it there, too"
                last = other.slot == cluster.groups[cluster.group(other)].num_slots - 1  # to which -1 leads
                return cluster.diagnosis(0.5 if last else 0.7, said, other, change.event, cause=change.event)
            continue
        stale = given is not None and given.event > padded.event
        said = f"padding of event {padded.event} wrote {other.place}, which {other.reader} read in {other.when}"
        return cluster.diagnosis(0.94 if not stale else 0.3, said, other, padded.event)
    return None
