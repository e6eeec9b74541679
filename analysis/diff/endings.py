"""Requests that only one trace has, and requests that end earlier, later or otherwise."""

from typing import Any, Final

from .divergences import AT_THE_END

# How far a request got in the target, and what became of it. The last verify forward writes guesses nobody heard of.
_ENDS: Final = """
create table {s}_ends as
with got as (
    select request_id, max(if(mode = 'target_verify', prefix, prefix + extend)) as got,
        max(if(mode = 'target_verify', extend, 0)) as guesses, max(losses) as losses
    from {s}_batches where runner = 0 group by request_id
),
told as (
    select request_id, arg_max(status, event) as status, arg_max(losses, event) as losses from {s}_statuses
    group by request_id
)
select request_id, got, guesses, coalesce(status, '') as status,
    coalesce(told.losses, got.losses) = got.losses as seen_to_the_end
from got left join told using (request_id)
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
    and ({sure} or (told and prompt_hash is not null and prompt_hash not in ({others})))
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
        told = [_any(connection, f"select count(*) from {side}_statuses") for side in ("a", "b")]
        ended = [
            f"({side}.status in ('finished', 'aborted') and {side}.seen_to_the_end)"
            if told[i]
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
