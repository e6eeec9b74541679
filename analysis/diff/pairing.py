"""Which request of one trace is which of the other, how each ends, and what differs only in when it was computed."""

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import AnalysisError
from ..store.connection import quoted
from .differences import AT_THE_END
from .facts import Statements, number
from .settings import DiffSettings, NotComparableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """How requests were aligned, how many each side has, how many pairs; `absent`: asked for, and in neither trace."""

    by: str
    a_requests: int
    b_requests: int
    pairs: int
    absent: tuple[str, ...] = ()


def pair_requests(connection: Any, settings: DiffSettings, *, hand_over: bool, whole: bool, hashed: bool) -> Pairing:
    """Make the table `pairs`; `whole` says that nothing of either trace is missing, `hashed` that the tokens are hashes.

    Raises `NotComparableError` without a request in common or with different salts, `AnalysisError` if none asked for is there.
    """
    sql = Statements(connection, "pairing")
    keys = {"id": "nullif(room, -1)::varchar" if hand_over else "label", "prompt": "prompt_hash::varchar"}

    def count(by: str) -> int:
        sql.run("pairs", key=keys[by], whole=whole)
        return number(connection, "select count(*) from pairs")

    sql.both("known")
    totals = _totals(connection)
    by = settings.align
    if by == "auto":
        many = 2 * count("id") >= max(1, min(totals))
        known, same = _prompts_of_pairs(connection)
        # Ids mean the same requests if three of four pairs have one prompt, as far as prompts are known.
        by = "id" if many and 4 * same >= 3 * known else "prompt"
    found = count(by)
    if not found and settings.align == "auto":
        by, found = "id", count("id")
    if not found:
        raise NotComparableError(
            f"no request in common: A has {totals[0]:,}, B has {totals[1]:,}, and none has the same "
            f"{'id or prompt' if settings.align == 'auto' else by}; record the same prompts, or try another --align"
        )
    known, same = _prompts_of_pairs(connection)
    if hashed and known and not same:
        raise NotComparableError(
            "the tokens of both are hashed, and no prompt is the same: by different salts, it seems; record both with one "
            "salt, see KVCANARY_TOKEN_SALT_FILE in docs/guide/production.md"
        )
    absent: tuple[str, ...] = ()
    if settings.requests:
        absent = _narrow(connection, settings.requests)
        found = number(connection, "select count(*) from pairs")
        totals = _totals(connection)
    by = "room" if hand_over and by == "id" else by
    return Pairing(by=by, a_requests=totals[0], b_requests=totals[1], pairs=found, absent=absent)


def _totals(connection: Any) -> list[int]:
    return [number(connection, f"select count(*) from {side}_known") for side in ("a", "b")]


def _prompts_of_pairs(connection: Any) -> tuple[int, int]:
    query = "select count(a_prompt = b_prompt), count(*) filter (where a_prompt = b_prompt) from pairs"
    known, same = connection.execute(query).fetchone()
    return int(known), int(same)


def _narrow(connection: Any, requests: tuple[str, ...]) -> tuple[str, ...]:
    """Leave only what was asked for, and return what of it neither trace has."""
    names = ", ".join(quoted(name) for name in requests)
    where = f"(label in ({names}) or request_id::varchar in ({names}))"
    known = " union all ".join(f"select label, request_id from {side}_known where {where}" for side in ("a", "b"))
    there = {text for row in connection.execute(known).fetchall() for text in (row[0], str(row[1]))}
    absent = tuple(name for name in requests if name not in there)
    if len(absent) == len(requests):
        raise AnalysisError(f"--requests: neither trace has a request {', '.join(requests)}")
    connection.execute(
        f"delete from pairs where not (a_label in ({names}) or b_label in ({names}) or a_id::varchar in ({names}) or "
        f"b_id::varchar in ({names}))"
    )
    for side in ("a", "b"):
        other = f"select {side}_id from pairs"
        connection.execute(f"delete from {side}_known where not ({where} or request_id in ({other}))")
    return absent


def find_endings(connection: Any, *, whole: tuple[bool, bool], late: tuple[bool, bool], hand_over: bool) -> int:
    """Add to `firsts` what is missing or ends otherwise, and return how many pairs were left out as unfinished.

    Of each trace, `whole`: nothing of it is missing, so that what is not there did not happen; `late`: its samples come late,
    and its engine runs one forward too many for each request. `hand_over`: they are two sides of one deployment.
    """
    sql = Statements(connection, "pairing")
    sql.both("ends")
    if hand_over:
        return 0
    ended = []
    for side, is_whole in zip("ab", whole, strict=True):
        known = number(connection, f"select count(*) from {side}_statuses")
        said = f"({side}.status in ('finished', 'aborted') and {side}.seen_to_the_end)"
        ended.append(said if known else str(is_whole).lower())
    judged = f"({ended[0]} and {ended[1]})"
    sql.run("lengths", judged=judged, slack=int(any(late)), end=AT_THE_END)
    unfinished = sql.count("unfinished", judged=judged)
    # What a request is known by may be lost in a trace that is not whole itself.
    a_only: dict[str, object] = {"at": AT_THE_END, "a_event": "event", "b_event": -1, "a": "label", "b": "''"}
    b_only: dict[str, object] = {"at": "event", "a_event": -1, "b_event": "event", "a": "''", "b": "label"}
    for side, other, sure, comparable, only in (
        ("a", "b", whole[0], whole[1], a_only),
        ("b", "a", whole[1], whole[0], b_only),
    ):
        if comparable:
            others = f"select prompt_hash from {other}_known where prompt_hash is not null"
            sql.run("missing", s=side, others=others, sure=sure, **only)
    return unfinished


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
