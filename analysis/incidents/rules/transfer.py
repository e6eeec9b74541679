"""What went wrong between a prefill and a decode engine."""

from ..cluster import Cluster, Diagnosis, rule, slot_query


@rule("freed during a transfer", "An abort frees pages whose transfer is not over. (S#24527, S#35049)")
def abort_frees_during_transfer(cluster: Cluster) -> Diagnosis | None:
    """Score slots that leave during their transfer; the late write lands on their new owner."""
    sign = cluster.finding("freed_during_transfer")
    if sign is None:
        return None
    of_request = f"of {sign.reader} " if sign.request_id >= 0 else ""
    return Diagnosis(
        score=0.96,
        sentence=f"{sign.place} {of_request}changed hands after {sign.when}: it {sign.detail}",
        evidence=cluster.evidence(sign, *sign.evidence),
        cause_event=sign.evidence[0] if sign.evidence else sign.event,
    )


@rule(
    "a transfer landed wrong",
    "A descriptor's stride is wrong, so that part of a transfer overwrites the neighbours. (V#54272)",
)
def transfer_wrong_stride(cluster: Cluster) -> Diagnosis | None:
    """Score a transfer that ends well and arrived differently, or neighbours that took its bytes without a write."""
    sign = cluster.finding("transfer_differs")
    if sign is not None:
        at_source = cluster.finding("transfer_source_damaged", "transfer_source_changed") is not None
        return Diagnosis(
            score=0.4 if at_source else 0.92,
            sentence=f"a transfer to {sign.reader} arrived wrong after {sign.when}, first in {sign.place}: {sign.detail}",
            evidence=(
                *cluster.evidence(sign),
                f"select * from transfers where request_id = {sign.request_id} order by event",
            ),
            cause_event=sign.event,
        )
    beside = cluster.only_kv_hash()
    change = cluster.last(beside, "changed") if beside is not None else None
    if beside is None or change is None or change.twin_kind != "transfer":
        return None
    return Diagnosis(
        score=0.8,
        sentence=f"{beside.place} of {beside.reader} took the bytes that a transfer brought to slot {change.twin[1]} in "
        f"event {change.twin_event}; read in {beside.when}",
        evidence=(*cluster.evidence(beside), slot_query(cluster.group(beside), change.twin[1])),
        follows_event=change.twin_event,
    )
