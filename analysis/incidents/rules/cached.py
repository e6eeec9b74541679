"""What went wrong with content that a request did not compute itself: cached, loaded, or sent by another engine."""

from ..cluster import CHAIN, CONTENT, KV_HASH, POSITION, TOKEN, Cluster, Diagnosis, request_query, rule, slot_query

_PREFILL_MODES = ("extend", "mixed", "draft_extend")
_SOURCE_WENT_WRONG = ("transfer_source_damaged", "transfer_source_changed")


@rule(
    "prefix hit before it was written",
    "A page is in the prefix cache while its forward has yet to write it. (V#38715)",
    recurs=True,
)
def hit_before_written(cluster: Cluster) -> Diagnosis | None:
    """Score slots that were the cache's before they were first written.

    A request of the same batch, or an equal one, joins them, and reads what the slots held before.
    """
    for sign in cluster.head:
        if sign.kind not in ("write_to_foreign_slot", "hit_never_written", "hit_differs") and not sign.bits & CONTENT:
            continue
        cached, given = cluster.last(sign, "cached"), cluster.last(sign, "alloc")
        if cluster.has_trace and (cached is None or given is None or cached.event < given.event):
            continue
        prefilling = sign.mode in _PREFILL_MODES
        if prefilling and sign.kind == "write_to_foreign_slot" and cluster.joined(sign):
            said = f"{sign.reader} joined {sign.place}, which the prefix cache holds, and then computed it again in "
            said += f"{sign.when}: it was taken for cached before it was written"
            queries = (*cluster.evidence(sign), request_query(sign.request_id))
            return cluster.diagnosis(0.92, said, sign, queries=queries, cause=sign.event)
        if cached is not None and given is not None:
            filled = ("written", "copied", "loaded", "received")
            if cluster.filled_between(sign, given.event, cached.event, *filled):
                continue
        known = sign.cause in ("same_forward", "held_by_cache") and not sign.bits
        if not known and not cluster.has_trace:
            continue
        score = 0.5 if not cluster.has_trace else 0.94 if prefilling else 0.6
        said = f"{sign.place} stood in the prefix cache before it was computed; in {sign.when} {sign.reader} "
        said += sign.detail or "read what had been there before"
        events = [sign.event, *(fact.event for fact in (cached, given) if fact is not None)]
        cause = cached.event if cached is not None else sign.event
        return cluster.diagnosis(score, said, sign, *events, cause=cause)
    return None


@rule(
    "a prefix hit of another prompt",
    "A prefix node's key covers only a part of its page's tokens, so that prompts that differ behind it hit it. (V#49377)",
    recurs=True,
)
def tokens_truncated_hash_kept(cluster: Cluster) -> Diagnosis | None:
    """Score a request that starts from cached slots with other tokens; the chain is whole, the other prompt's."""
    wrong, hit = cluster.violation(TOKEN), cluster.finding("hit_differs")
    sign = wrong if wrong is not None else hit
    if sign is None or cluster.violation(CHAIN | POSITION) is not None:
        return None
    if cluster.finding("row_reassigned", "read_of_foreign_slot", "write_to_foreign_slot", "read_after_free"):
        return None
    score = 0.8 if hit is not None else 0.6
    if cluster.has_trace:
        begin = cluster.facts.begins.get(sign.request_id)
        starts = begin is not None and begin.prefix_len > sign.position
        joined = hit is not None or cluster.last(sign, "shared") is not None
        score = 0.55 + (0.25 if starts else 0) + (0.1 if joined else 0)
    found = sign.detail
    if wrong is not None:
        found = f"token {wrong.stored_token} instead of {wrong.expected_token}, written by {wrong.writer}"
    said = f"{sign.reader} hit a cached page of another prompt in {sign.when}: {sign.place} holds {found}"
    return cluster.diagnosis(score, said, sign)


@rule(
    "a prefix hit across adapters, salts, weights or media",
    "The prefix cache's key leaves out what the KV depends on beside its tokens, or new weights come without a flush. (lab)",
    recurs=True,
)
def adapter_not_in_key(cluster: Cluster) -> Diagnosis | None:
    """Score a request that starts from slots with its own tokens, computed under another identity."""
    sign = cluster.finding("identity")
    if sign is None:
        return None
    said = f"{sign.reader} began in {sign.when} from KV that is not its own: {sign.place}: it {sign.detail}"
    return cluster.diagnosis(0.95, said, sign, *sign.evidence, cause=sign.event)


@rule(
    "a fork's copy is missing",
    "A fork gets fresh slots for the page that its parent had begun, and the parent's KV is not copied. (lab)",
)
def fork_copy_missing(cluster: Cluster) -> Diagnosis | None:
    """Score a request that begins with a prefix it did not compute, in fresh slots of its own that hold nothing."""
    for sign in cluster.head:
        if sign.kind not in ("hit_never_written", "hit_differs") and not sign.bits & CONTENT:
            continue
        given = cluster.last(sign, "alloc", "shared", "cached")
        begin = cluster.facts.begins.get(sign.request_id)
        if given is None or given.what != "alloc" or given.request_id != sign.request_id or begin is None:
            continue
        if begin.prefix_len <= sign.position or cluster.last(sign, "copied", "loaded", "received", "receive_failed"):
            continue
        admitted = cluster.facts.status_before(sign.request_id, sign.event)
        if admitted is not None and admitted.event > begin.event:
            continue
        said = (
            f"{sign.reader} began in forward {begin.forward} with {begin.prefix_len} tokens that it did not compute, "
        )
        said += f"and nothing had been copied to its own {sign.place}, given to it in event {given.event}"
        return cluster.diagnosis(0.92, said, sign, given.event, begin.event, cause=given.event)
    return None


@rule(
    "a failed load was taken for done",
    "A load-back or transfer fails and is counted as loaded. (dynamo#15079)",
    recurs=True,
)
def failed_load_counted_loaded(cluster: Cluster) -> Diagnosis | None:
    """Score slots that a failed transfer, or a load from the host tier, should have filled; they hold what was there."""
    for sign in cluster.head:
        if sign.kind not in ("hit_never_written", "hit_differs") and not sign.bits & (CONTENT | KV_HASH):
            continue
        given, failed = cluster.last(sign, "alloc"), cluster.last(sign, "receive_failed")
        load = failed or cluster.last(sign, "loaded")
        if load is None or (given is not None and given.event > load.event):
            continue
        since = [f for f in cluster.history(sign) if f.event > load.event and f.what in ("changed", "written")]
        if since and "written" in (since[0].what, since[-1].what):
            continue
        # What was never loaded is seen as a change of the whole page; a flipped byte is one slot's.
        whole = not since or since[0].together > 1 or max(1, cluster.groups[0].page_size) == 1
        why = "whose transfer failed" if failed is not None else "and it holds something else"
        said = f"{sign.reader} read {sign.place} in {sign.when} as loaded in event {load.event}, {why}"
        score = 0.94 if failed is not None else 0.91 if whole else 0.55
        return cluster.diagnosis(score, said, sign, load.event, sign.event, cause=load.event)
    return None


@rule("freed during a transfer", "An abort frees pages whose transfer is not over. (S#24527, S#35049)")
def abort_frees_during_transfer(cluster: Cluster) -> Diagnosis | None:
    """Score slots that leave during their transfer; the late write lands on their new owner."""
    sign = cluster.finding("freed_during_transfer")
    if sign is None:
        return None
    of_request = f"of {sign.reader} " if sign.request_id >= 0 else ""
    said = f"{sign.place} {of_request}changed hands after {sign.when}: it {sign.detail}"
    return cluster.diagnosis(0.96, said, sign, *sign.evidence, cause=sign.evidence[0] if sign.evidence else sign.event)


@rule(
    "a transfer landed wrong",
    "A descriptor's stride is wrong, so that part of a transfer overwrites the neighbours. (V#54272)",
)
def transfer_wrong_stride(cluster: Cluster) -> Diagnosis | None:
    """Score a transfer that ends well and arrived differently, or neighbours that took its bytes without a write."""
    sign = cluster.finding("transfer_differs")
    if sign is not None:
        score = 0.4 if cluster.finding(*_SOURCE_WENT_WRONG) is not None else 0.92
        said = f"a transfer to {sign.reader} arrived wrong after {sign.when}, first in {sign.place}: {sign.detail}"
        asked = f"select * from transfers where request_id = {sign.request_id} order by event"
        return cluster.diagnosis(score, said, sign, queries=(*cluster.evidence(sign), asked), cause=sign.event)
    beside = cluster.only_kv_hash()
    change = cluster.last(beside, "changed") if beside is not None else None
    if beside is None or change is None or change.twin_kind != "transfer":
        return None
    said = (
        f"{beside.place} of {beside.reader} took the bytes that a transfer brought to slot {change.twin[1]} in event "
    )
    said += f"{change.twin_event}; read in {beside.when}"
    queries = (*cluster.evidence(beside), slot_query(cluster.group(beside), change.twin[1]))
    return cluster.diagnosis(0.8, said, beside, queries=queries, follows=change.twin_event)
