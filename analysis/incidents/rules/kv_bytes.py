"""What went wrong with the KV bytes of slots, while their records are right."""

from ....replayer.checks.layers import BEHIND_THE_FIRST
from ....replayer.report.findings import NO_ADAPTER
from ..cluster import Cluster, Diagnosis, rule, slot_query
from ..seen.likely import POSSIBLE
from ..seen.observed import may_be_damaged, still_empty, stored_nowhere
from .allocation import written_again


@rule("a KV write was lost", branch="write")
def kv_write_lost(cluster: Cluster) -> Diagnosis | None:
    """A token is written and its slot's bytes are still another token's, written before. (lab)"""
    sign = cluster.finding("write_lost")
    damaged = cluster.finding("write_damaged")
    if sign is None and damaged is not None and damaged.cause == "as_before":
        sign = damaged
    for other in cluster.head if sign is None else ():
        event = stored_nowhere(cluster, other) if other.bits else None
        if event is not None:
            said = f"position {other.position} of {other.reader} was computed in event {event}, and its K and V were stored nowhere: "
            said += f"it was sent to no slot, as seen in {other.when} at {other.place}"
            return cluster.diagnosis(0.93, said, other, event, other.event, cause=event)
    if sign is None:
        sign = still_empty(cluster)
        said = "the KV write of {0.reader} to {0.place} in {0.when} may not have come to all layers: {0.detail}, and nobody had "
        said += "written the slot before"
        return None if sign is None else cluster.diagnosis(0.66, said.format(sign), sign, sign.event, cause=sign.event)
    said = f"the KV write of {sign.reader} to {sign.place} in {sign.when} was lost: it {sign.detail}"
    # Two requests that were given one slot write it in turn; the first one's write is not what is wrong.
    taken = cluster.finding("write_to_foreign_slot", "slot_written_twice", "slot_double_allocated", "slot_freed_twice")
    return cluster.diagnosis(0.95 if taken is None else 0.4, said, sign, *sign.evidence, cause=sign.event)


@rule("a KV write was damaged", branch="write")
def kv_write_damaged(cluster: Cluster) -> Diagnosis | None:
    """What a forward leaves in a slot is not what the model handed to the cache. (lab)"""
    words = "what {0.reader} wrote to {0.place} was damaged within {0.when}: {0.detail}"
    sign = cluster.finding("write_damaged")
    # What is as it was before, or as a pool is made, may never have been written.
    return cluster.said_by("write_damaged", words, 0.95 if sign is None or not sign.cause else 0.6)


@rule("K and V of another adapter or other weights", branch="identity")
def computed_with_other_weights(cluster: Cluster) -> Diagnosis | None:
    """A token is computed with another adapter, or by weights that have been replaced: records and tables are right, and the
    bytes are not those that the same token got before. (trace by hand)
    """
    words = "{0.reader} {0.detail} in {0.when}: the layers were given that for them"
    told = cluster.said_by("computed_otherwise", words)
    sign = cluster.finding("token_bytes")
    if sign is None or told is not None or sign.cause == "rotated":
        return told
    said = f"{sign.reader} was computed with another adapter or with other weights in {sign.when}: {sign.detail}"
    # What was damaged on its way into the pool, or went to a slot of somebody else's, differs too.
    others = any(one.kind != "token_bytes" for one in cluster.head)
    if damaged := may_be_damaged(cluster, sign):
        said += "; what the layers hand to the pool was not watched, and may have been damaged on its way"
    score = 0.5 if others else POSSIBLE if damaged or sign.cause in NO_ADAPTER else 0.85
    return cluster.diagnosis(score, said, sign, *sign.evidence, cause=sign.event)


@rule("K or V that the model does not give", branch="content")
def not_of_the_model(cluster: Cluster) -> Diagnosis | None:
    """The first layer writes another token's V, K of another position, or what no token of the model named has: tables and
    records are right. (vLLM and SGLang with faults in their model)
    """
    sign, certain = cluster.finding("model_bytes"), 0.9
    said = "{0.reader} was computed otherwise than the model says in {0.when}: {0.detail}"
    if sign is None:
        sign, certain = cluster.finding("token_bytes"), 0.85
        said = "{0.reader} has K that was rotated (RoPE) by another position than its own in {0.when}, or by other angles: it {0.detail}, "
        said += "and V is the token's"
    if sign is None or (sign.kind == "token_bytes" and sign.cause not in ("rotated", *NO_ADAPTER)):
        return None
    if sign.cause in NO_ADAPTER:
        certain, said = 0.6, "{0.reader} was computed from something else than its tokens in {0.when}: it {0.detail}"
    others = any(one.kind not in ("model_bytes", "token_bytes") for one in cluster.head)
    if sign.kind == "token_bytes" and may_be_damaged(cluster, sign):
        certain = POSSIBLE
    return cluster.diagnosis(0.5 if others else certain, said.format(sign), sign, *sign.evidence, cause=sign.event)


@rule("KV bytes changed without a write", branch="write")
def kv_changed(cluster: Cluster) -> Diagnosis | None:
    """A byte of a slot changes between its write and its read. The record is right, the KV hash alone is not, and
    no write of the trace holds these bytes. (canary: kv_used, kv_unused_cache, kv_post_forward)
    """
    damaged = cluster.finding("transfer_source_damaged", "transfer_source_changed")
    if damaged is not None:
        said = f"KV bytes changed on the prefill side: {damaged.place} of {damaged.reader} no longer held what had been written when "
        said += f"it was sent, before {damaged.when}"
        return cluster.diagnosis(0.85, said, damaged)
    sign = cluster.only_kv_hash()
    if sign is None or (written_again(cluster, sign) or (-1, -1))[0] == sign.event:
        return None  # the forward itself writes the slot, for another position
    change, filled = cluster.last(sign, "changed"), cluster.filled(sign)
    score = 0.9 if len(cluster.places()) == 1 else 0.72
    if filled is not None and filled.what in ("copied", "loaded"):
        score = 0.6  # what brought it is likelier
    noticed = ""
    if change is not None:
        many = f", of {change.together} slots at once" if change.together > 1 else ""
        noticed = f"; the change was seen in event {change.event}{many}"
        if change.twin != (-1, -1):
            score -= 0.25
            noticed += f", with the bytes written to slot {change.twin[1]} in event {change.twin_event}"
        score -= 0.08 if change.together > 1 else 0
    elif cluster.has_trace:
        score -= 0.1
    said = f"KV bytes of {sign.place} changed without a write, first read in {sign.when} by {sign.reader}; written last by "
    said += f"{sign.writer}{noticed}"
    cause, follows = (-1, -1) if change is None else (change.event, change.twin_event)
    return cluster.diagnosis(score, said, sign, cause=cause, follows=follows)


@rule("unhashed K or V changed without a write", branch="write")
def layer_changed(cluster: Cluster) -> Diagnosis | None:
    """Bytes of a slot change in a layer or place that the canary does not hash; those that it does are as they were. (lab)"""
    words = "{0.place} changed without a write, seen in {0.when} by {0.reader}: {0.detail}"
    return cluster.said_by("layer_changed", words, 0.9)


@rule("values that no model writes", branch="content", aftermath=True)
def bad_values_written(cluster: Cluster) -> Diagnosis | None:
    """K or V of a layer get values that no model writes: an overflow, a kernel that reads what nobody wrote, a scale that is wrong or 0. (lab)"""
    words, sign = "{0.reader} wrote values that no model writes in {0.when}: {0.detail}", cluster.finding("bad_values")
    if sign is not None and sign.cause == "saturated":
        words += "; look at the cache's scales"
    score = 0.95 if still_empty(cluster) is None else 0.5
    # A write that is lost is lost in all layers, or in one; what a layer computes wrongly all behind it have.
    whole = sign is not None and sign.detail.endswith(BEHIND_THE_FIRST)
    return cluster.said_by("bad_values", words, max(score, 0.62) if whole else score)


@rule("pool groups share memory", branch="write")
def groups_alias(cluster: Cluster) -> Diagnosis | None:
    """Two groups' buffers overlap, so that a write in one changes the other's bytes: the change has a twin, the
    same bytes written in the other group. (V#41657)
    """
    sign = cluster.only_kv_hash()
    if sign is None or (cluster.has_trace and len(cluster.groups) < 2):
        return None
    for other in cluster.head:
        change, group, filled = cluster.last(other, "changed"), cluster.group(other), cluster.filled(other)
        if filled is not None and filled.what in ("loaded", "received"):
            continue  # what brought it is likelier
        if change is not None and change.twin[0] not in (-1, group):
            of_group, of_slot = change.twin
            said = (
                f"pool groups {group} and {of_group} share memory: {other.place} took the bytes that were written to "
            )
            said += (
                f"slot {of_slot} of group {of_group} in event {change.event}; {other.reader} read them in {other.when}"
            )
            queries = (*cluster.evidence(other), slot_query(of_group, of_slot))
            return cluster.diagnosis(0.95, said, other, queries=queries, cause=change.event)
    slots = cluster.places()
    said = f"KV bytes of {len(slots)} slots changed together, first {sign.place}: perhaps another pool group maps to the same memory"
    return cluster.diagnosis(0.5, said, sign) if len(slots) > 1 else None
