"""What went wrong with where tokens were written, and with padding."""

from ..cluster import KV_HASH, Cluster, Diagnosis, Sign, events_query, rule
from .allocation import own_free


@rule(
    "tokens written to the wrong slots",
    "The slots that a forward writes are not those that its rows name. (lab)",
    recurs=True,
)
def slot_mapping(cluster: Cluster) -> Diagnosis | None:
    """Score a token in a slot that is not its row's, or two tokens in one.

    What says where a forward's tokens go (out_cache_loc, a slot mapping) is worked out beside the block table, and is
    off: by one, of the step before, or one slot for two tokens. Attention reads the slot that the row names.
    """
    sign = cluster.finding("table_entry_differs", "slot_written_twice", "padding_slot_read")
    if sign is None or cluster.finding("slot_double_allocated", anywhere=True) is not None:
        return None
    reads = sign.kind == "padding_slot_read"
    said = f"in {sign.when} {sign.reader} {'reads' if reads else 'wrote a token to'} {sign.place}: {sign.detail}"
    return cluster.diagnosis(0.6 if reads else 0.95, said, sign, *sign.evidence, cause=sign.event)


@rule(
    "committed beyond its allocation",
    "A request counts slots as its own that no allocation gave it, and writes into the next page's owner. (S#28754)",
)
def commit_beyond_allocation(cluster: Cluster) -> Diagnosis | None:
    """Score slots that do not exist, or a write into a page that was never the writer's.

    Its holder has had it all along; no free and no allocation comes in between.
    """
    outside = cluster.finding("slot_out_of_pool")
    if outside is not None:
        said = f"{outside.place} is none of the pool's: after {outside.when}, of {outside.reader}, {outside.detail}"
        queries = (events_query(outside.evidence or [outside.event]),)
        return cluster.diagnosis(0.9, said, outside, queries=queries, cause=outside.event)
    for sign in cluster.head:
        if sign.kind != "write_to_foreign_slot" or sign.request_id < 0:
            continue
        given = cluster.last(sign, "alloc", "shared", "cached")
        if cluster.has_trace and (given is None or given.request_id == sign.request_id):
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


@rule(
    "padding wrapped to the last slot",
    "The padding slot -1 is taken as an index from the end, so that padding overwrites the last slot. (V#43810)",
    recurs=True,
)
def pad_slot_wraps(cluster: Cluster) -> Diagnosis | None:
    """Score KV bytes of the last slot that change without a write, in forwards whose padding should have gone nowhere."""
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


@rule(
    "padding wrote a live slot",
    "Rows that pad a batch keep the slots that they had a step before. (lmdeploy#4569)",
    recurs=True,
)
def pad_rows_keep_last_blocks(cluster: Cluster) -> Diagnosis | None:
    """Score padding that is written to slots which somebody holds or reads."""
    sign = cluster.finding("padded_write")
    if sign is not None:
        said = f"padding of {sign.when} wrote {sign.place}: it {sign.detail}"
        return cluster.diagnosis(0.95, said, sign, *sign.evidence)
    for other in cluster.head:
        padded, given = cluster.last(other, "padded"), cluster.last(other, "alloc")
        if padded is None or not other.bits & KV_HASH:
            continue
        stale = given is not None and given.event > padded.event
        said = f"padding of event {padded.event} wrote {other.place}, which {other.reader} read in {other.when}"
        return cluster.diagnosis(0.94 if not stale else 0.3, said, other, padded.event)
    return None
