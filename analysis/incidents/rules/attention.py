"""What went wrong with what attention reads."""

from ..cluster import Cluster, Diagnosis, events_query, rule


@rule(
    "sliding window read wrongly",
    "A forward reads fewer or more positions of its prefix than the sliding window has. (lab)",
    recurs=True,
)
def window_read_wrong(cluster: Cluster) -> Diagnosis | None:
    """Score a read of other positions than the window's; table and slots stay whole."""
    sign = cluster.finding("wrong_window")
    if sign is None:
        return None
    return Diagnosis(
        score=0.95,
        sentence=f"in {sign.when} {sign.reader} {sign.detail}",
        evidence=(events_query(sign.evidence),),
        cause_event=sign.event,
    )


@rule(
    "attention's own table differs",
    "The attention backend's copy of the block table is overwritten in flight. (TensorRT-LLM#15546)",
    recurs=True,
)
def attention_table_overwritten(cluster: Cluster) -> Diagnosis | None:
    """Score slots that attention alone got; table and records stay whole."""
    sign = cluster.finding("attention_slots")
    if sign is None:
        return None
    alone = all(other.kind.startswith("attention_") for other in cluster.head)
    return Diagnosis(
        score=0.96 if alone else 0.5,
        sentence=f"in {sign.when} attention was given a slot that is not the block table's, at position {sign.position} of "
        f"{sign.reader}: {sign.detail}",
        evidence=(
            f"select * from attention_slots where event = {sign.event} order by batch_index, position limit 50",
            events_query(sign.evidence),
        ),
        cause_event=sign.event,
    )


@rule(
    "attention's length is wrong",
    "The sequence length that attention gets is not the request's: its cached prefix is left out, or it is stale or one "
    "off. (V#46460)",
    recurs=True,
)
def attention_seq_len_wrong(cluster: Cluster) -> Diagnosis | None:
    """Score a length of the attention metadata that is built apart from the batch. K and V stay whole; some are not read."""
    sign = cluster.finding("attention_lens")
    if sign is None:
        return None
    return Diagnosis(
        score=0.9,
        sentence=f"in {sign.when} attention got a wrong length of {sign.reader}: {sign.detail}",
        evidence=(
            (
                "select forward, request_id, prefix_len, extend_len, attention_seq_len, attention_query_len "
                f"from forward_requests where event = {sign.event}"
            ),
            events_query(sign.evidence),
        ),
        cause_event=sign.event,
    )
