"""What went wrong with the KV bytes of slots, while their records are right."""

from ..cluster import Cluster, Diagnosis, rule, slot_query


@rule("a KV write was lost", "A token is written and its slot's bytes are still another token's, written before. (lab)")
def kv_write_lost(cluster: Cluster) -> Diagnosis | None:
    """Score a lost write: the bytes are still, byte for byte, those of the token before."""
    sign = cluster.finding("write_lost")
    if sign is None:
        return None
    return Diagnosis(
        score=0.95,
        sentence=f"the KV write of {sign.reader} to {sign.place} in {sign.when} was lost: it {sign.detail}",
        evidence=cluster.evidence(sign, *sign.evidence),
        cause_event=sign.event,
    )


@rule("a KV write was damaged", "What a forward leaves in a slot is not what the model handed to the cache. (lab)")
def kv_write_damaged(cluster: Cluster) -> Diagnosis | None:
    """Score bytes that were damaged within the forward that wrote them."""
    sign = cluster.finding("write_damaged")
    if sign is None:
        return None
    return Diagnosis(
        score=0.95,
        sentence=f"what {sign.reader} wrote to {sign.place} was damaged within {sign.when}: {sign.detail}",
        evidence=cluster.evidence(sign, *sign.evidence),
        cause_event=sign.event,
    )


@rule(
    "KV bytes changed without a write",
    "A byte of a slot changes between its write and its read. The record is right, the KV hash alone is not, and "
    "no write of the trace holds these bytes. (canary: kv_used, kv_unused_cache, kv_post_forward)",
)
def kv_changed(cluster: Cluster) -> Diagnosis | None:
    """Score a flipped bit, or somebody who writes where it should not: one slot at a time, and no write has those bytes.

    The canary's own three perturbations end here: what was flipped when, nobody can know from outside.
    """
    damaged = cluster.finding("transfer_source_damaged", "transfer_source_changed")
    if damaged is not None and all(s.kind == damaged.kind or s.kind.startswith("transfer_") for s in cluster.head):
        return Diagnosis(
            score=0.85,
            sentence=f"KV bytes changed on the prefill side: {damaged.place} of {damaged.reader} no longer held what had "
            f"been written when it was sent, before {damaged.when}",
            evidence=cluster.evidence(damaged),
        )
    sign = cluster.only_kv_hash()
    if sign is None:
        return None
    change = cluster.last(sign, "changed")
    slots = {(cluster.group(other), other.slot) for other in cluster.head}
    score = 0.9 if len(slots) == 1 else 0.72
    noticed = ""
    if change is not None:
        noticed = f"; the change was seen in event {change.event}"
        if change.twin != (-1, -1):
            score -= 0.25
            noticed += f", with the bytes written to slot {change.twin[1]} in event {change.twin_event}"
        score -= 0.08 if change.together > 1 else 0
    elif cluster.has_trace:
        score -= 0.1
    return Diagnosis(
        score=score,
        sentence=f"KV bytes of {sign.place} changed without a write, first read in {sign.when} by {sign.reader}; written "
        f"last by {sign.writer}{noticed}",
        evidence=cluster.evidence(sign),
        cause_event=-1 if change is None else change.event,
        follows_event=-1 if change is None else change.twin_event,
    )


@rule(
    "pool groups share memory",
    "Two groups' buffers overlap, so that a write in one changes the other's bytes: the change has a twin, the "
    "same bytes written in the other group. (V#41657)",
    recurs=True,
)
def groups_alias(cluster: Cluster) -> Diagnosis | None:
    """Score wrong KV bytes that are those of a token which another group's slot was given at that time.

    It comes back with every write there.
    """
    sign = cluster.only_kv_hash()
    if sign is None or (cluster.has_trace and len(cluster.groups) < 2):
        return None
    for other in cluster.head:
        change = cluster.last(other, "changed")
        if change is not None and change.twin[0] not in (-1, cluster.group(other)):
            of_group, of_slot = change.twin
            return Diagnosis(
                score=0.95,
                sentence=f"pool groups {cluster.group(other)} and {of_group} share memory: {other.place} took the bytes "
                f"that were written to slot {of_slot} of group {of_group} in event {change.event}; {other.reader} read "
                f"them in {other.when}",
                evidence=(*cluster.evidence(other), slot_query(of_group, of_slot)),
                cause_event=change.event,
            )
    slots = {(cluster.group(other), other.slot) for other in cluster.head}
    if len(slots) < 2:
        return Diagnosis(
            score=0.3,
            sentence=f"{sign.place} may share memory with a slot of another pool group, written at the same time",
        )
    return Diagnosis(
        score=0.5,
        sentence=f"KV bytes of {len(slots)} slots changed together, first {sign.place}: perhaps another pool group maps to "
        "the same memory",
        evidence=cluster.evidence(sign),
    )
