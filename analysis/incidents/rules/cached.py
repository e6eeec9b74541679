"""What went wrong with content that a request did not compute itself: cached, loaded, or sent by another engine."""

from ..cluster import Cluster, Diagnosis, request_query, rule, slot_query
from ..facts import Fact
from ..seen.likely import POSSIBLE
from ..seen.observed import (
    behind_its_end,
    cached_by_nobody,
    filled_while_read,
    open_transfer,
    page_of_elsewhere,
    row_replaced,
)
from ..sign import CHAIN, CONTENT, KV_HASH, POSITION, TOKEN, Sign
from .copies import NOTHING_LANDED, copy_finding

_NEW_WEIGHTS = "other_weights"
_PREFILL_MODES = ("extend", "mixed", "draft_extend")
_SOURCE_WENT_WRONG = ("transfer_source_damaged", "transfer_source_changed")


@rule("prefix hit before it was written", branch="content")
def hit_before_written(cluster: Cluster) -> Diagnosis | None:
    """A page is in the prefix cache while its forward has yet to write it. (V#38715)"""
    unfilled = cached_by_nobody(cluster)
    if unfilled is not None:
        said = f"{unfilled.place} was taken into the prefix cache after {unfilled.when} and had been given to nobody who could have computed it"
        return cluster.diagnosis(0.85, said, unfilled, cause=unfilled.event)
    for sign in cluster.head:
        cached, given = cluster.last(sign, "cached"), cluster.last(sign, "alloc")
        if cluster.joined(sign) and filled_while_read(cluster, sign):
            said = f"{sign.reader} began in {sign.when} with {sign.place}, which another request of the forward was to fill, and did: "
            return cluster.diagnosis(0.85, f"{said}{sign.differs}", sign, cause=sign.event)
        unwritten = sign.bits & CONTENT and sign.writer_event < 0 and cluster.filled(sign) is None
        # Or another was given it, and has never filled it.
        others = given is None or (given.request_id != sign.request_id and cached is None)
        since = -1 if given is None else given.event
        if unwritten and others and cluster.joined(sign, since) and sign.request_id not in cluster.facts.loads:
            said = f"{sign.reader} began in {sign.when} with {sign.place} of the prefix cache, which nobody has computed: {sign.differs}"
            return cluster.diagnosis(0.85, said, sign, cause=sign.event)
        if cluster.has_trace and (cached is None or given is None or cached.event < given.event):
            continue
        prefilling = sign.mode in _PREFILL_MODES
        filled = ("written", "copied", "loaded", "received")
        whole = sign.count >= (cluster.groups[cluster.group(sign)].page_size if cluster.groups else 1) > 1
        before = given is not None and cluster.filled_between(sign, given.event, sign.event, *filled)
        if before and not whole:
            continue
        if sign.kind == "write_to_foreign_slot" and cluster.joined(sign):
            said = f"{sign.reader} joined {sign.place}, which the prefix cache holds, and then computed it again in "
            said += f"{sign.when}: it was taken for cached before it was written"
            queries = (*cluster.evidence(sign), request_query(sign.request_id))
            return cluster.diagnosis(0.92, said, sign, queries=queries, cause=sign.event)
        if (
            cached is not None
            and given is not None
            and cluster.filled_between(sign, given.event, cached.event, *filled)
        ):
            continue
        if sign.cause not in ("same_forward", "held_by_cache") and not cluster.has_trace:
            continue
        score = 0.5 if not cluster.has_trace else 0.94 if prefilling else 0.6
        said = f"{sign.place} stood in the prefix cache before it was computed; in {sign.when} {sign.reader} "
        said += sign.detail or "read what had been there before"
        events = [sign.event, *(fact.event for fact in (cached, given) if fact is not None)]
        cause = cached.event if cached is not None else sign.event
        return cluster.diagnosis(score, said, sign, *events, cause=cause)
    return None


@rule("a prefix hit of another prompt", branch="identity")
def tokens_truncated_hash_kept(cluster: Cluster) -> Diagnosis | None:
    """A cached page's key leaves out a part of its tokens, what came before them, or their place, so that prompts that differ
    in that hit it. (V#49377)
    """
    own = _own_tokens_of_elsewhere(cluster)
    if own is not None:
        return own
    if len(cluster.head) > 1 and all(sign.bits == TOKEN or sign.kind == "hit_differs" for sign in cluster.head):
        first = cluster.first
        whole = first.position % max(1, cluster.groups[0].page_size if cluster.groups else 1) == 0
        if whole and cluster.rewrite_of(first) is not None:
            # Only tokens differ: a page of another prompt at the very positions, with all that comes before it.
            said = (
                f"{first.reader} got a page of another prompt for its own in {first.when}: {first.place} holds token "
            )
            said += f"{first.stored_token} instead of {first.expected_token}, written by {first.writer}"
            return cluster.diagnosis(0.92, said, first)
    wrong, hit = cluster.violation(TOKEN), cluster.finding("hit_differs")
    sign = wrong if wrong is not None else hit
    if sign is None or (cluster.violation(CHAIN | POSITION) is not None and not _as_cached(cluster, sign)):
        return None
    score = 0.8 if hit is not None else 0.6
    if cluster.has_trace:
        begin, wrote = cluster.facts.begins.get(sign.request_id), cluster.wrote(sign)
        starts = begin is not None and begin.prefix_len > sign.position
        starts |= wrote is not None and cluster.joined(sign, wrote[0])  # it gave back its own for what was cached
        joined = hit is not None or cluster.last(sign, "shared") is not None
        score = 0.55 + (0.25 if starts else 0) + (0.1 if joined else 0)
        if not cluster.complete and not cluster.joined(sign):  # that its row names what its prefix does is not seen
            score = min(score, POSSIBLE)
        prompt = cluster.facts.prompts.get(sign.writer_request_id, -1)
        # An answer's token may be kept under the key of another than was computed.
        if 0 <= prompt <= sign.position:
            score = min(score, POSSIBLE)
    found = sign.detail
    if wrong is not None:
        found = f"token {wrong.stored_token} instead of {wrong.expected_token}, written by {wrong.writer}"
    said = f"{sign.reader} hit a cached page of another prompt in {sign.when}: {sign.place} holds {found}"
    return cluster.diagnosis(score, said, sign)


def _own_tokens_of_elsewhere(cluster: Cluster) -> Diagnosis | None:
    """A cached page that holds its reader's tokens, computed behind another prompt or at another position."""
    for sign in cluster.head:
        moved = sign.bits & POSITION and not sign.bits & TOKEN and sign.stored_position >= 0
        other = f"at position {sign.stored_position}" if moved else "behind another prompt"
        said = f"{sign.reader} hit a cached page in {sign.when} that holds its own tokens, computed {other} by {sign.writer}: {sign.place}"
        begin = cluster.facts.begins.get(sign.request_id)
        begins = begin is not None and begin.event == sign.event and not cluster.window(sign)
        if begins and (sign.bits == CHAIN or moved) and _as_cached(cluster, sign):
            return cluster.diagnosis(0.94, said, sign, cause=sign.event)
        if page_of_elsewhere(cluster, sign):
            return cluster.diagnosis(0.8, said, sign, cause=sign.event)
    return None


_OTHERS = "{0.reader} began in {0.when} from KV that is not its own: {0.place}: it {0.detail}"


@rule("a prefix hit across adapters, salts or media", branch="identity")
def identity_not_in_key(cluster: Cluster) -> Diagnosis | None:
    """The prefix cache's key leaves out what the KV depends on beside its tokens: the adapter, the salt, the media. (lab)"""
    sign = cluster.finding("identity")
    return None if sign is None or sign.cause == _NEW_WEIGHTS else cluster.said_by("identity", _OTHERS)


@rule("the prefix cache outlived its weights", branch="identity")
def cache_kept_over_new_weights(cluster: Cluster) -> Diagnosis | None:
    """New weights are loaded and the prefix cache is not emptied: a request begins from KV of the old ones. (lmdeploy#4917)"""
    sign = cluster.finding("identity")
    return cluster.said_by("identity", _OTHERS) if sign is not None and sign.cause == _NEW_WEIGHTS else None


@rule("recurrent state of another prefix", branch="content")
def state_restored_for_other_prefix(cluster: Cluster) -> Diagnosis | None:
    """A request goes on from recurrent state that is not its own prefix's, or comes to have such: a wrong checkpoint, a slot
    freed too early, a checkpoint saved too late, an older state put back. (lab)
    """
    sign = cluster.finding("state_differs")
    words = "{0.reader} read recurrent state that is not its own in {0.when}: it {0.detail}"
    if sign is not None and sign.cause in ("left_as_it_was", "as_anothers"):
        words = "what {0.reader} computed in {0.when} is not in its recurrent state: it {0.detail}"
    return cluster.said_by("state_differs", words)


def _as_cached(cluster: Cluster, sign: Sign) -> bool:
    """Whether a sign's request joined the slot as cached, and nobody touched it since it was handed to the cache."""
    cached = cluster.last(sign, "cached")
    if cached is None or not cluster.joined(sign, cached.event):
        return False
    touched = ("written", "copied", "loaded", "received", "changed", "evict", "free", "alloc")
    return not cluster.filled_between(sign, cached.event, sign.event, *touched)


def _never_filled(cluster: Cluster) -> tuple[Sign, Fact] | None:
    """A slot that its reader was given, whose position it counts as computed, and that nobody has filled since."""
    for sign in cluster.head:
        if sign.kind not in ("hit_never_written", "hit_differs") and not sign.bits & CONTENT:
            continue
        given = cluster.last(sign, "alloc", "shared", "cached")
        if given is None or given.what != "alloc" or given.request_id != sign.request_id:
            continue
        own, admitted = cluster.wrote(sign), cluster.facts.status_before(sign.request_id, sign.event)
        filled = cluster.last(sign, "written", "copied", "loaded", "received", "receive_failed")
        if (own is None or own[0] < given.event) and (filled is None or filled.event < given.event):
            begin = cluster.facts.begins.get(sign.request_id)
            if admitted is None or begin is None or admitted.status != "retracted":
                return sign, given
    return None


@rule("a fork's copy is missing", branch="content")
def fork_copy_missing(cluster: Cluster) -> Diagnosis | None:
    """A fork gets fresh slots for the page that its parent had begun, and the parent's KV is not copied. (lab)"""
    found = _never_filled(cluster)
    if found is None or not cluster.forked(found[0]):
        return None
    (sign, given), begin = found, cluster.facts.begins.get(found[0].request_id)
    if begin is None:
        return None
    said = f"{sign.reader} began in forward {begin.forward} with {begin.prefix_len} tokens that it did not compute, and nothing "
    said += f"had been copied to its own {sign.place}, given to it in event {given.event}"
    return cluster.diagnosis(0.92, said, sign, given.event, begin.event, cause=given.event)


@rule("a prefix that nobody computed", branch="content")
def prefix_not_computed(cluster: Cluster) -> Diagnosis | None:
    """A count of computed tokens outlives the slots that they were in: a request goes on behind a prefix whose
    slots are fresh. (tt-inference-server#4557)
    """
    found = _never_filled(cluster)
    if found is None or (cluster.rewrite_of(found[0]) is not None and not row_replaced(cluster, found[0])):
        return None
    sign, given = found
    since = (cluster.wrote(sign) or (-1,))[0]
    loaded = any(since < at <= sign.event for at in cluster.facts.loads.get(sign.request_id, ()))
    if cluster.forked(sign) or (loaded and not behind_its_end(cluster, sign)):
        return None  # its parent or a storage was to fill it
    back = " was put back, came again and" if cluster.facts.retracted_before(sign.request_id, sign.event) else ""
    said = f"{sign.reader}{back} counts position {sign.position} as computed in {sign.when}; its slot was given to it in event "
    said += f"{given.event} and nobody has written it since: {sign.place}"
    return cluster.diagnosis(0.93, said, sign, given.event, sign.event, cause=given.event)


@rule("a failed load was taken for done", branch="transfer")
def failed_load_counted_loaded(cluster: Cluster) -> Diagnosis | None:
    """A load-back or transfer fails, or brings less than was asked for, and is counted as loaded. (dynamo#15079)"""
    short = _load_came_short(cluster)
    if short is not None:
        return short
    read = cluster.finding("failed_load_read")
    if read is not None:
        said = f"{read.reader} read {read.place} in {read.when}, {read.detail[6:]}: it counts as loaded"
        return cluster.diagnosis(0.94, said, read, read.event, cause=read.event)
    copy = copy_finding(cluster, *NOTHING_LANDED, "loaded_wrong")
    if copy is not None:
        said = f"{copy.place} of {copy.reader} {copy.detail}, in {copy.when}, and counts as loaded"
        beside = copy_finding(
            cluster, "landed_elsewhere", "other_order", "stored_wrong", "stored_over", "changed_in_store"
        )
        score = 0.6 if beside is not None else POSSIBLE if copy.cause != "nothing_landed" else 0.92
        return cluster.diagnosis(score, said, copy, cause=copy.event)
    for sign in cluster.head:
        if sign.kind not in ("hit_never_written", "hit_differs") and not sign.bits & (CONTENT | KV_HASH):
            continue
        unchanged = cluster.not_loaded(sign)
        if unchanged is not None:
            said = f"{sign.reader} read {sign.place} in {sign.when}, which counts as loaded since event {unchanged.event}, and the "
            said += "load has changed none of its bytes"
            return cluster.diagnosis(0.93, said, sign, unchanged.event, sign.event, cause=unchanged.event)
        load = cluster.last(sign, "receive_failed") or cluster.filled(sign)
        given = cluster.last(sign, "alloc")
        # The allocation of what is loaded may be recorded behind the load itself.
        fresh = (
            given is not None and load is not None and given.event > load.event and sign.request_id != given.request_id
        )
        if load is None or load.what not in ("loaded", "receive_failed") or fresh or load.together > 1:
            continue
        if load.event in cluster.facts.landed:  # what its slots hold has changed since
            continue
        since = [f for f in cluster.history(sign) if f.event > load.event and f.what in ("changed", "written")]
        # What was never loaded is seen as a change of the whole page, or at the first look behind the load; a flipped byte is
        # one slot's, and comes later.
        whole = not since or since[0].together > 1 or max(1, cluster.groups[0].page_size) == 1
        whole |= bool(since) and since[0].via < load.event
        why = "and its bytes are not those that were stored for it"
        if load.what == "receive_failed":
            why = "though that transfer failed"
        said = f"{sign.reader} read {sign.place} in {sign.when}, which counts as loaded since event {load.event}, {why}"
        score = 0.94 if load.what == "receive_failed" else 0.91 if whole else 0.55
        if load.what == "loaded" and sign.bits & CONTENT and not sign.bits & KV_HASH:
            score = min(score, 0.6)  # the bytes are those that came: they were stored for other tokens
        return cluster.diagnosis(score, said, sign, load.event, sign.event, cause=load.event)
    return None


def _load_came_short(cluster: Cluster) -> Diagnosis | None:
    """A slot of a request that came back from the host, which the load did not reach."""
    missing = _never_filled(cluster)
    if missing is not None:
        sign, given = missing
        since = (cluster.wrote(sign) or (-1,))[0]
        load = next((at for at in cluster.facts.loads.get(sign.request_id, ()) if since < at <= sign.event), -1)
        if load >= 0 and not behind_its_end(cluster, sign):
            said = f"{sign.reader} came back from the host in event {load} and reads {sign.place} in {sign.when}, which was given to "
            said += f"it in event {given.event} and which nothing has filled since: the load brought less than it counts for"
            return cluster.diagnosis(0.94, said, sign, given.event, load, sign.event, cause=load)
    return None


@rule("a host slot was overwritten before its load-back", branch="transfer")
def host_copy_overwritten(cluster: Cluster) -> Diagnosis | None:
    """Two device pages are stored to one host page; the second overwrites the first before that is loaded.
    (TRT#9056)
    """
    twice = copy_finding(cluster, "two_to_one")
    if twice is not None:
        said = f"{twice.place} {twice.detail}, in {twice.when}: whoever loads either gets what was stored last"
        return cluster.diagnosis(0.95, said, twice, *twice.evidence, cause=twice.event)
    over = copy_finding(cluster, "stored_over")
    if over is not None:
        said = f"{over.place} {over.detail}, in {over.when}: what was stored there is gone, and its entry still leads there"
        return cluster.diagnosis(0.95, said, over, *over.evidence, cause=min([*over.evidence, over.event]))
    for sign in cluster.head:
        load = cluster.filled(sign)
        if load is not None and load.what == "loaded" and load.together > 1:
            said = f"{sign.reader} read {sign.place} in {sign.when}, loaded in event {load.event} from host slot {load.via}, which had "
            said += f"been stored {load.together} times by then: it holds what was stored there last"
            return cluster.diagnosis(0.95, said, sign, load.event, sign.event, cause=load.event)
    return None


@rule("a copy did not bring its source", branch="transfer")
def copy_failed(cluster: Cluster) -> Diagnosis | None:
    """A copy inside the pool is recorded, and its destination holds other bytes than its source: it was left out,
    ran late, or went elsewhere. (transformers#44379)
    """
    sign = cluster.only_kv_hash()
    copy = cluster.filled(sign) if sign is not None else None
    if sign is None or copy is None or copy.what != "copied":
        return None
    said = f"{sign.reader} read {sign.place} in {sign.when}, copied from slot {copy.via} in event {copy.event}, and it does not hold "
    said += "the bytes of that slot"
    queries = (*cluster.evidence(sign, copy.event), slot_query(cluster.group(sign), copy.via))
    return cluster.diagnosis(0.93, said, sign, queries=queries, cause=copy.event)


@rule("freed during a transfer", branch="transfer")
def abort_frees_during_transfer(cluster: Cluster) -> Diagnosis | None:
    """An abort frees pages whose transfer is not over. (S#24527, S#35049)"""
    sign = cluster.finding("freed_during_transfer")
    if sign is None:
        return _given_on(cluster)
    of_request = f"of {sign.reader} " if sign.request_id >= 0 else ""
    said = f"{sign.place} {of_request}changed hands after {sign.when}: it {sign.detail}"
    return cluster.diagnosis(0.96, said, sign, *sign.evidence, cause=sign.evidence[0] if sign.evidence else sign.event)


def _given_on(cluster: Cluster) -> Diagnosis | None:
    """A slot whose transfer had no end when another request wrote it, and whose bytes changed without a write since."""
    sign = cluster.only_kv_hash()
    begun = open_transfer(cluster, sign) if sign is not None else None
    if sign is None or begun is None:
        return None
    said = f"a transfer to {sign.place} was begun in event {begun.event} for another request and had no end when {sign.writer} wrote "
    said += f"the slot; its bytes changed without a write since, read in {sign.when} by {sign.reader}: it landed then"
    return cluster.diagnosis(0.93, said, sign, begun.event, sign.event, cause=begun.event)


@rule("a transfer landed wrong", branch="transfer")
def transfer_wrong_stride(cluster: Cluster) -> Diagnosis | None:
    """A descriptor's stride is wrong, so that part of a transfer overwrites the neighbours. (V#54272)"""
    sign = cluster.finding("transfer_differs")
    if sign is not None:
        score = 0.4 if cluster.finding(*_SOURCE_WENT_WRONG) is not None else 0.92
        said = f"a transfer to {sign.reader} arrived wrong after {sign.when}, first in {sign.place}: {sign.detail}"
        asked = f"select * from transfers where request_id = {sign.request_id} order by event"
        return cluster.diagnosis(score, said, sign, queries=(*cluster.evidence(sign), asked), cause=sign.event)
    wrong = copy_finding(cluster, "loaded_wrong")
    if wrong is not None:
        said = f"{wrong.place} of {wrong.reader} {wrong.detail}, in {wrong.when}: if all of it came, not in its place"
        return cluster.diagnosis(0.5, said, wrong, cause=wrong.event)
    beside = cluster.only_kv_hash()
    change = cluster.last(beside, "changed") if beside is not None else None
    if beside is not None and change is not None and change.behind >= 0 and open_transfer(cluster, beside) is None:
        said = f"{beside.place} of {beside.reader} changed right behind what the load of event {change.behind} filled, which went on "
        said += f"beyond its end; read in {beside.when}"
        return cluster.diagnosis(0.85, said, beside, change.behind, change.event, cause=change.behind)
    if beside is None or change is None or change.twin_kind != "transfer":
        return None
    said = (
        f"{beside.place} of {beside.reader} took the bytes that a transfer brought to slot {change.twin[1]} in event "
    )
    said += f"{change.twin_event}; read in {beside.when}"
    queries = (*cluster.evidence(beside), slot_query(cluster.group(beside), change.twin[1]))
    return cluster.diagnosis(0.8, said, beside, queries=queries, follows=change.twin_event)
