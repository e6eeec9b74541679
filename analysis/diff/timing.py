"""What differs only in when and with whom things were computed: prefix hits, chunks, order, retraction."""

from dataclasses import asdict, dataclass
from typing import Any

from .statements import Statements


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
        return not self.words()

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
    sql = Statements(connection, "timing")
    sql.both("plans")
    sql.both("retractions")
    sql.run("both")
    if hand_over:  # each side computes its own part
        connection.execute("delete from plans")
    sql.run("hits")
    sql.run("schedules")
    [totals] = sql.rows("totals")
    modes = [{}, {}] if hand_over else [dict(sorted(m.items())) for m in (a_modes, b_modes)]
    return Timing(**totals, a_modes=modes[0], b_modes=modes[1])
