"""Which request of one trace is which of the other."""

from dataclasses import dataclass
from typing import Any, Final

from ..errors import AnalysisError
from ..store.live import quoted
from .differences import AT_THE_END
from .settings import DiffSettings, NotComparableError

_KNOWN: Final = """
create table {s}_known as
with known as (
    select request_id, arg_min(name, event) as name, max(room) as room, max(prompt_len) as prompt_len,
        min(event) as event
    from {s}_requests group by request_id
),
seen as (select request_id, min(event) as event from {s}_batches group by request_id),
hashes as (select request_id, arg_min(prompt_hash, event) as prompt_hash from {s}_prompts group by request_id)
select coalesce(known.request_id, seen.request_id) as request_id, coalesce(known.name, '') as name,
    coalesce(known.room, -1) as room, coalesce(known.prompt_len, -1) as prompt_len,
    least(known.event, seen.event) as event, hashes.prompt_hash, seen.request_id is not null as ran,
    known.request_id is not null as was_known,
    case when name <> '' then name else coalesce(known.request_id, seen.request_id)::varchar end as label
from known full join seen using (request_id)
left join hashes on hashes.request_id = coalesce(known.request_id, seen.request_id)
"""

# Requests of one key are paired by name where they have the same, the others in the order in which they came; where some
# may be lost, only if there are as many on both sides.
_PAIRS: Final = """
create or replace table pairs as
with keyed_a as (
    select *, {key} as key, row_number() over (partition by {key}, label order by event, request_id) as of_name from a_known
    where {key} is not null
),
keyed_b as (
    select *, {key} as key, row_number() over (partition by {key}, label order by event, request_id) as of_name from b_known
    where {key} is not null
),
twins as (select key, label, of_name from keyed_a semi join keyed_b using (key, label, of_name)),
a as (
    select keyed_a.*, if(twins.key is null, '', label) as twin,
        row_number() over (partition by key, twin order by event, request_id) as nth,
        count(*) over (partition by key, twin) as alike
    from keyed_a left join twins using (key, label, of_name)
),
b as (
    select keyed_b.*, if(twins.key is null, '', label) as twin,
        row_number() over (partition by key, twin order by event, request_id) as nth,
        count(*) over (partition by key, twin) as alike
    from keyed_b left join twins using (key, label, of_name)
)
select row_number() over (order by a.event) - 1 as pair, a.request_id as a_id, b.request_id as b_id,
    a.label as a_label, b.label as b_label, greatest(a.prompt_len, b.prompt_len) as prompt_len,
    a.prompt_hash as a_prompt, b.prompt_hash as b_prompt, a.event as a_event, b.event as b_event
from a join b using (key, twin, nth)
where twin <> '' or {whole} or a.alike = b.alike
"""

_BY_ID: Final = "label"
_BY_ROOM: Final = "nullif(room, -1)::varchar"
_BY_PROMPT: Final = "prompt_hash::varchar"
MISSING_LABEL: Final = "(label in ({names}) or request_id::varchar in ({names}))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """How requests were aligned, how many there are on each side, and how many pairs; of those asked for, if any were.

    `absent` are the names and ids asked for that neither trace has.
    """

    by: str
    a_requests: int
    b_requests: int
    pairs: int
    absent: tuple[str, ...] = ()


def pair_requests(connection: Any, settings: DiffSettings, *, hand_over: bool, whole: bool, hashed: bool) -> Pairing:
    """Make the table `pairs`; `whole` says that nothing of either trace is missing, `hashed` that the tokens are hashes.

    Raises:
        NotComparableError: the traces have no request in common, or hashes by different salts.
        AnalysisError: none of the requests asked for is there.
    """
    for side in ("a", "b"):
        connection.execute(_KNOWN.format(s=side))
    totals = _totals(connection)
    keys = {"id": _BY_ROOM if hand_over else _BY_ID, "prompt": _BY_PROMPT}
    by = settings.align
    if by == "auto":
        many = 2 * _count(connection, keys["id"], whole) >= max(1, min(totals))
        by = "id" if many and _same_prompts(connection) else "prompt"
    found = _count(connection, keys[by], whole)
    if not found and settings.align == "auto" and _count(connection, keys["id"], whole):
        by = "id"
        found = _count(connection, keys["id"], whole)
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
        found = int(connection.execute("select count(*) from pairs").fetchone()[0])
        totals = _totals(connection)
    return Pairing(
        by="room" if hand_over and by == "id" else by,
        a_requests=totals[0],
        b_requests=totals[1],
        pairs=found,
        absent=absent,
    )


def _totals(connection: Any) -> list[int]:
    return [int(connection.execute(f"select count(*) from {side}_known").fetchone()[0]) for side in ("a", "b")]


def _count(connection: Any, key: str, whole: bool) -> int:
    connection.execute(_PAIRS.format(key=key, whole=whole))
    return int(connection.execute("select count(*) from pairs").fetchone()[0])


def _same_prompts(connection: Any) -> bool:
    """Whether ids mean the same requests: three of four pairs have one prompt, as far as prompts are known."""
    known, same = _prompts_of_pairs(connection)
    return 4 * same >= 3 * known


def _prompts_of_pairs(connection: Any) -> tuple[int, int]:
    """Return of how many pairs both prompts are known, and of how many they are the same."""
    query = "select count(a_prompt = b_prompt), count(*) filter (where a_prompt = b_prompt) from pairs"
    known, same = connection.execute(query).fetchone()
    return int(known), int(same)


def _narrow(connection: Any, requests: tuple[str, ...]) -> tuple[str, ...]:
    """Leave only what was asked for, and return what of it neither trace has."""
    names = ", ".join(quoted(name) for name in requests)
    where = MISSING_LABEL.format(names=names)
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


# How far a request got in the target, and what became of it. The last verify forward writes guesses nobody heard of.
_ENDS: Final = """
create table {s}_ends as
with got as (
    select request_id, max(if(mode = 'target_verify', prefix, prefix + extend)) as got,
        max(if(mode = 'target_verify', extend, 0)) as guesses, max(losses) as losses
    from {s}_batches where runner = 0 group by request_id
),
last_status as (
    select request_id, arg_max(status, event) as status, arg_max(losses, event) as losses from {s}_statuses
    group by request_id
)
select request_id, got, guesses, coalesce(status, '') as status,
    coalesce(last_status.losses, got.losses) = got.losses as seen_to_the_end
from got left join last_status using (request_id)
"""

_LENGTHS: Final = """
insert into firsts
select pair, 'length', 0, -1, least(a.got, b.got), {end}, -1, -1, -1, -1,
    a.got || ' tokens' || if(a.status <> '', ', ' || a.status, ''),
    b.got || ' tokens' || if(b.status <> '', ', ' || b.status, '')
from pairs join a_ends as a on a.request_id = a_id join b_ends as b on b.request_id = b_id
where {judged} and not (a.status = 'aborted' and b.status = 'aborted')
    and abs(a.got - b.got) > {slack} + greatest(a.guesses, b.guesses)
"""
_UNFINISHED: Final = """
select count(*) from pairs join a_ends as a on a.request_id = a_id join b_ends as b on b.request_id = b_id
where not ({judged})
"""

_MISSING: Final = """
insert into firsts
select -2 - row_number() over (order by event), 'missing', 0, -1, -1, {at}, {a_event}, -1, {b_event}, -1,
    {a}, {b}
from {s}_known where ran and request_id not in (select {s}_id from pairs)
    and ({sure} or (was_known and prompt_hash is not null and prompt_hash not in ({others})))
"""


def find_endings(connection: Any, *, whole: tuple[bool, bool], late: tuple[bool, bool], hand_over: bool) -> int:
    """Add to `firsts` what is missing or ends otherwise, and return how many pairs were left out as unfinished.

    Args:
        connection: with the facts of both traces, `pairs` and `firsts`.
        whole: of each trace, whether nothing of it is missing, so that what is not there did not happen.
        late: of each trace, whether samples come late: such an engine runs one forward too many for each request.
        hand_over: whether the traces are two sides of one deployment, each with a part of every request.
    """
    for side in ("a", "b"):
        connection.execute(_ENDS.format(s=side))
    unfinished = 0
    if not hand_over:
        statuses = [_any(connection, f"select count(*) from {side}_statuses") for side in ("a", "b")]
        ended = [
            f"({side}.status in ('finished', 'aborted') and {side}.seen_to_the_end)"
            if statuses[i]
            else str(whole[i]).lower()
            for i, side in enumerate(("a", "b"))
        ]
        judged = f"({ended[0]} and {ended[1]})"
        slack = int(any(late))
        connection.execute(_LENGTHS.format(judged=judged, slack=slack, end=AT_THE_END))
        unfinished = _any(connection, _UNFINISHED.format(judged=judged))
    for i, side in enumerate(("a", "b")):
        if whole[1 - i] and not hand_over:
            mine = "label" if side == "a" else "''"
            theirs = "label" if side == "b" else "''"
            connection.execute(
                _MISSING.format(
                    s=side,
                    others=f"select prompt_hash from {'ba'[i]}_known where prompt_hash is not null",
                    sure=whole[i],  # else what a request is known by may be lost
                    at="event" if side == "b" else AT_THE_END,
                    a_event="event" if side == "a" else -1,
                    b_event="event" if side == "b" else -1,
                    a=mine,
                    b=theirs,
                )
            )
    return unfinished


def _any(connection: Any, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
