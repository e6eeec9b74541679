"""What differs only in when and with whom things were computed: prefix hits, chunks, order, retraction."""

from dataclasses import asdict, dataclass
from typing import Any, Final

_PLANS: Final = """
create table {s}_plans as
select pair, min(event) as first, arg_min(forward, event) as first_forward, arg_min(prefix, event) as hit,
    count(*) as forwards,
    list(extend order by event) filter (where mode in ('extend', 'mixed') and prefix < prompt_len) as chunks
from {s}_batches as t join pairs on pairs.{s}_id = t.request_id where runner = 0 group by pair
"""
_RETRACTIONS: Final = """
create table {s}_retractions as
select pair, count(*) as times from {s}_statuses join pairs on pairs.{s}_id = request_id
where status = 'retracted' group by pair
"""

_BOTH: Final = """
create table plans as
select pair, a.first as a_first, b.first as b_first, a.first_forward as a_forward, b.first_forward as b_forward,
    a.hit as a_hit, b.hit as b_hit, a.forwards as a_forwards, b.forwards as b_forwards,
    coalesce(a.chunks, []) as a_chunks, coalesce(b.chunks, []) as b_chunks,
    coalesce(ra.times, 0) as a_retracted, coalesce(rb.times, 0) as b_retracted,
    row_number() over (order by a.first, pair) as a_rank, row_number() over (order by b.first, pair) as b_rank
from a_plans as a join b_plans as b using (pair)
left join a_retractions as ra using (pair) left join b_retractions as rb using (pair)
"""

_HITS: Final = """
insert into firsts
select pair, 'hit', 0, -1, least(a_hit, b_hit), b_first, a_first, a_forward, b_first, b_forward,
    a_hit || ' tokens', b_hit || ' tokens'
from plans where a_hit <> b_hit
"""
_SCHEDULES: Final = """
insert into firsts
select pair, 'schedule', 0, -1, -1, b_first, a_first, a_forward, b_first, b_forward,
    concat_ws(', ', 'chunks ' || array_to_string(a_chunks, '+'), a_forwards || ' forwards',
        if(a_retracted > 0, 'retracted ' || a_retracted || ' times', null), if(a_rank <> b_rank, a_rank || '. in line', null)),
    concat_ws(', ', 'chunks ' || array_to_string(b_chunks, '+'), b_forwards || ' forwards',
        if(b_retracted > 0, 'retracted ' || b_retracted || ' times', null), if(a_rank <> b_rank, b_rank || '. in line', null))
from plans where a_chunks <> b_chunks or a_forwards <> b_forwards or a_retracted <> b_retracted or a_rank <> b_rank
"""
_TOTALS: Final = """
select count(*) filter (where a_hit <> b_hit) as other_hits,
    count(*) filter (where a_chunks <> b_chunks) as other_chunks,
    count(*) filter (where a_forwards <> b_forwards) as other_forward_counts,
    count(*) filter (where a_rank <> b_rank) as other_order,
    coalesce(sum(a_hit), 0)::bigint as a_cached, coalesce(sum(b_hit), 0)::bigint as b_cached,
    coalesce(sum(a_retracted), 0)::bigint as a_retractions, coalesce(sum(b_retracted), 0)::bigint as b_retractions
from plans
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How many pairs of requests were scheduled otherwise, and each trace's totals."""

    other_hits: int
    other_chunks: int
    other_forward_counts: int
    other_order: int
    a_cached: int
    b_cached: int
    a_retractions: int
    b_retractions: int
    a_modes: dict[str, int]
    b_modes: dict[str, int]

    @property
    def same(self) -> bool:
        """Whether both traces ran the same forwards, as far as these figures show."""
        return not (self.other_hits or self.other_chunks or self.other_forward_counts or self.other_order) and (
            self.a_modes == self.b_modes and self.a_retractions == self.b_retractions
        )

    def words(self) -> list[str]:
        """Say what differs, a line each."""
        lines = []
        if self.other_hits:
            lines.append(
                f"prefix hits of {self.other_hits:,} requests: {self.a_cached:,} tokens came from the cache in A, "
                f"{self.b_cached:,} in B"
            )
        if self.other_chunks:
            lines.append(f"prompts of {self.other_chunks:,} requests were computed in other chunks")
        if self.a_modes != self.b_modes:
            modes = sorted({*self.a_modes, *self.b_modes})
            parts = [f"{m} {self.a_modes.get(m, 0):,} / {self.b_modes.get(m, 0):,}" for m in modes]
            lines.append(f"forwards, A / B: {', '.join(parts)}")
        elif self.other_forward_counts:
            lines.append(f"{self.other_forward_counts:,} requests went through another number of forwards")
        if self.other_order:
            lines.append(f"{self.other_order:,} requests began in another order")
        if self.a_retractions != self.b_retractions:
            lines.append(f"retractions: {self.a_retractions:,} in A, {self.b_retractions:,} in B")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "same": self.same}


def find_timing(connection: Any, a_modes: dict[str, int], b_modes: dict[str, int], *, hand_over: bool) -> Timing:
    """Add what differs in scheduling to `firsts`, and return the totals."""
    for side in ("a", "b"):
        connection.execute(_PLANS.format(s=side))
        connection.execute(_RETRACTIONS.format(s=side))
    connection.execute(_BOTH)
    if hand_over:  # each side computes its own part
        connection.execute("delete from plans")
    connection.execute(_HITS)
    connection.execute(_SCHEDULES)
    result = connection.execute(_TOTALS)
    names = [column[0] for column in result.description]
    totals = dict(zip(names, result.fetchone(), strict=True))
    modes = [{}, {}] if hand_over else [dict(sorted(m.items())) for m in (a_modes, b_modes)]
    return Timing(**totals, a_modes=modes[0], b_modes=modes[1])
