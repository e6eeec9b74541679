"""The joins that find, for each pair of requests and each kind, the first place where the two traces part.

Every statement adds to the table `firsts`. `seen` is the event of B at which the difference shows, by which differences
are ordered; `AT_THE_END` where it shows only when a request, or the trace, is over.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from .comparability import beyond

AT_THE_END: Final = 1 << 62

_FIRSTS: Final = """
create table firsts (
    pair bigint, kind varchar, runner integer, pool_group integer, position bigint, seen bigint,
    a_event bigint, a_forward bigint, b_event bigint, b_forward bigint, a varchar, b varchar
)
"""

# Rejected guesses of a target are nobody's tokens; of those accepted, the last write at a position counts. Where something
# was lost before the request's next forward, nobody knows what became of its guesses.
_KEPT_GUESSES: Final = """
create table {s}_kept as
with settled as (select request_id, max(prefix) as upto from {s}_batches where runner = 0 group by request_id),
ordered as (
    select request_id, position, event, guess, max(event) over (partition by request_id, position) as last
    from {s}_tokens where runner = 0
),
known as (
    select request_id, event from {s}_batches where runner = 0
    qualify lead(losses, 1, losses) over (partition by request_id order by event) = losses
)
select request_id as k_request, position as k_position, event as k_event
from ordered join settled using (request_id) semi join known using (request_id, event)
where guess = 1 and event = last and position < upto
"""

_FACTS: Final = """
create table {s}_facts as
select pair, runner, position, round, if(guess = 2, -1, token) as token, fed - position as off,
    if(guess = 2, 0, reads) as reads, misreads, bool_or(unsure <> 0) as unsure, min(event) as event,
    arg_min(forward, event) as forward
from {s}_tokens as t join pairs on pairs.{s}_id = t.request_id
{kept}
group by all
"""
_WITH_KEPT: Final = """
left join {s}_kept on k_request = t.request_id and k_position = position and k_event = event
where guess in (0, 3) or k_event is not null{drafts}
"""

_ALL: Final = "pair, runner, position, round, token, off, reads, misreads"
_PLACE: Final = "pair, runner, position, round"

_PLACES: Final = f"""
create table places as
with only_a as (from a_facts anti join b_facts using ({_ALL})),
only_b as (from b_facts anti join a_facts using ({_ALL})),
spots as (select {_PLACE} from only_a union select {_PLACE} from only_b),
a as (
    select {_PLACE}, list_sort(list(distinct token)) as tokens, list_sort(list(distinct off)) as offs,
        list_sort(list(distinct reads)) as contents, list_sort(list(distinct misreads)) as wrongs,
        bool_or(unsure) as unsure
    from a_facts semi join spots using ({_PLACE}) group by all
),
b as (
    select {_PLACE}, list_sort(list(distinct token)) as tokens, list_sort(list(distinct off)) as offs,
        list_sort(list(distinct reads)) as contents, list_sort(list(distinct misreads)) as wrongs,
        bool_or(unsure) as unsure, min(event) as event, arg_min(forward, event) as forward
    from b_facts semi join spots using ({_PLACE}) group by all
),
odd_a as (select {_PLACE}, min(event) as event, arg_min(forward, event) as forward from only_a group by all),
odd_b as (select {_PLACE}, min(event) as event, arg_min(forward, event) as forward from only_b group by all)
select a.pair, a.runner, a.position, a.round, a.tokens as a_tokens, b.tokens as b_tokens, a.offs as a_offs,
    b.offs as b_offs, a.contents <> b.contents and not a.unsure and not b.unsure as other_content,
    a.wrongs <> b.wrongs and not (a.unsure and a.wrongs = [0]) and not (b.unsure and b.wrongs = [0]) as other_wrongs,
    odd_a.event as a_event, odd_a.forward as a_forward, coalesce(odd_b.event, b.event) as b_event,
    coalesce(odd_b.forward, b.forward) as b_forward
from a join b using ({_PLACE}) left join odd_a using ({_PLACE}) left join odd_b using ({_PLACE})
"""

_FIRST_PLACES: Final = """
insert into firsts
select pair, '{kind}', r.runner, -1, r.position, r.b_event, r.a_event, r.a_forward, r.b_event, r.b_forward, {a}, {b}
from (
    select pair, arg_min(p, (b_event, position)) as r
    from (select pair, p, p.b_event as b_event, p.position as position from places as p where {where}) group by pair
)
"""

_SAMPLED: Final = """
insert into firsts
with a as (
    select pair, position, list_sort(list(distinct token)) as tokens, min(event) as event,
        arg_min(forward, event) as forward
    from a_samples as s join pairs on pairs.a_id = s.request_id where position >= prompt_len group by all
),
b as (
    select pair, position, list_sort(list(distinct token)) as tokens, min(event) as event,
        arg_min(forward, event) as forward
    from b_samples as s join pairs on pairs.b_id = s.request_id where position >= prompt_len group by all
),
differing as (
    select pair, position, struct_pack(
        position := position, a_event := a.event, a_forward := a.forward, b_event := b.event, b_forward := b.forward,
        a := array_to_string(a.tokens, ' or '), b := array_to_string(b.tokens, ' or ')) as r
    from a join b using (pair, position) where a.tokens <> b.tokens
)
select pair, 'sampled', 0, -1, r.position, r.b_event, r.a_event, r.a_forward, r.b_event, r.b_forward, r.a, r.b
from (select pair, arg_min(r, (r.b_event, r.position)) as r from differing group by pair)
"""

_KV: Final = """
create table {s}_bytes as
with ordered as (
    select pair, pool_group, position, event, forward, bytes
    from {s}_kv as t join pairs on pairs.{s}_id = t.request_id
    {kept}
)
select pair, pool_group, position, arg_{which}(bytes, event) as bytes, {which}(event) as event,
    arg_{which}(forward, event) as forward
from ordered group by all
"""
_KV_PAIRS: Final = """
select a.pair, a.pool_group, a.position, a.event as a_event, a.forward as a_forward, b.event as b_event,
    b.forward as b_forward, a.bytes as a_bytes, b.bytes as b_bytes
from a_bytes as a join b_bytes as b using (pair, pool_group, position) where a.bytes <> b.bytes
"""
# Of a trace with losses the first write may be lost, and what is left be what the other trace wrote later on.
_NOT_AGAIN: Final = """
    and not exists (
        from {o}_kv as t join pairs on pairs.{o}_id = t.request_id
        where pairs.pair = {s}.pair and t.pool_group = {s}.pool_group and t.position = {s}.position and t.bytes = {s}.bytes
    )
"""
_FIRST_KV: Final = """
insert into firsts
select pair, 'kv', -1, r.pool_group, r.position, r.b_event, r.a_event, r.a_forward, r.b_event, r.b_forward,
    hex(r.a_bytes), hex(r.b_bytes)
from (select d.pair, arg_min(d, (d.b_event, d.position)) as r from {differing} as d group by d.pair)
"""

_CHANGED: Final = """
insert into firsts
with odd as (
    select '{s}' as side, c.*, pairs.pair from {s}_changes as c left join pairs on pairs.{s}_id = c.request_id
    anti join {o}_changes as other on other.pool_group = c.pool_group and other.content = c.content
)
select coalesce(pair, -1), 'kv_changed', -1, r.pool_group, r.position, {at}, {a_place}, {b_place}, {a}, {b}
from (select pair, arg_min(odd, (event, position)) as r from odd group by pair)
where pair is not null or {whole}
"""

_PROMPTS: Final = """
insert into firsts
select pair, 'input', 0, -1, -1, b_event, a_event, -1, b_event, -1, 'one prompt', 'another prompt' from pairs
where a_prompt <> b_prompt
    and not exists (from firsts where firsts.pair = pairs.pair and kind = 'input')
"""

# Other content after another token is its consequence; without one, a wrong slot was read from the very first.
_CONTEXT: Final = """
delete from firsts as c where kind = 'context' and exists (
    from firsts as o where o.pair = c.pair and o.kind <> 'context' and o.seen <= c.seen
)
"""


def find_differences(
    connection: Any,
    *,
    kv: bool,
    hand_over: bool,
    kv_dtype: str,
    tolerance: float | None,
    everything: bool,
    whole: tuple[bool, bool],
) -> dict[str, int]:
    """Fill `firsts` and return how much was compared: tokens, sampled tokens, KV places.

    Args:
        connection: with the facts of both traces and the table `pairs`.
        kv: whether KV bytes are compared.
        hand_over: whether only bytes that were sent and received are compared.
        kv_dtype: what they are.
        tolerance: as in `DiffSettings`.
        everything: whether all requests count, so that a change to a slot of nobody's does too.
        whole: of each trace, whether nothing of it is missing.
    """
    connection.execute(_FIRSTS)
    kept: dict[str, str] = {}
    for side in ("a", "b"):
        guesses = connection.execute(f"select count(*) from {side}_tokens where guess = 1").fetchone()[0]
        if guesses:
            connection.execute(_KEPT_GUESSES.format(s=side))
        kept[side] = _WITH_KEPT.format(s=side, drafts="{drafts}") if guesses else ""
        connection.execute(_FACTS.format(s=side, kept=kept[side].format(drafts=" or guess = 2")))
    compared = {"tokens": _number(connection, f"select count(*) from a_facts semi join b_facts using ({_PLACE})")}
    connection.execute(_PLACES)
    for kind, where, a, b in (
        ("input", "a_tokens <> b_tokens", _listed("r.a_tokens"), _listed("r.b_tokens")),
        ("position", "a_offs <> b_offs", _moved("r.a_offs"), _moved("r.b_offs")),
        ("table", "other_wrongs", "''", "''"),
        ("context", "other_content", "''", "''"),
    ):
        connection.execute(_FIRST_PLACES.format(kind=kind, where=where, a=a, b=b))
    connection.execute(_SAMPLED)
    compared["sampled"] = _number(connection, _COMMON_SAMPLES)
    connection.execute(_PROMPTS)
    if kv:
        compared["kv"] = _compare_kv(connection, kept, hand_over, kv_dtype, tolerance, whole)
        nowhere = "-1, -1"
        place = "r.event, r.forward"
        for s, o in (("a", "b"), ("b", "a")):
            mine, theirs = (place, nowhere) if s == "a" else (nowhere, place)
            text = "'slot ' || r.slot || ' changed'"
            connection.execute(
                _CHANGED.format(
                    s=s,
                    o=o,
                    at=str(AT_THE_END - 1) if s == "a" else "r.event",
                    a_place=mine,
                    b_place=theirs,
                    a=text if s == "a" else "'no change'",
                    b=text if s == "b" else "'no change'",
                    whole=everything,
                )
            )
    connection.execute(_CONTEXT)
    connection.execute("update firsts set kind = 'table' where kind = 'context'")
    return compared


_COMMON_SAMPLES: Final = """
select count(*) from (
    select pair, position from a_samples join pairs on pairs.a_id = request_id where position >= prompt_len
    intersect
    select pair, position from b_samples join pairs on pairs.b_id = request_id where position >= prompt_len
)
"""


def _listed(column: str) -> str:
    return f"array_to_string({column}, ' or ')"


def _moved(column: str) -> str:
    return f"array_to_string(list_transform({column}, lambda x: x + r.position), ' or ')"


def _number(connection: Any, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])


def _compare_kv(
    connection: Any,
    kept: dict[str, str],
    hand_over: bool,
    dtype: str,
    tolerance: float | None,
    whole: tuple[bool, bool],
) -> int:
    for side in ("a", "b"):
        settled = kept[side].format(drafts="") or "where guess in (0, 3)"
        if hand_over:
            settled = "where guess = 3"
        # What is sent is what was written last; otherwise the first time a token is computed counts.
        which = "max" if hand_over else "min"
        connection.execute(_KV.format(s=side, kept=settled, which=which))
    differing = _KV_PAIRS
    for s, o, is_whole in (("a", "b", whole[0]), ("b", "a", whole[1])):
        differing += "" if is_whole or hand_over else _NOT_AGAIN.format(s=s, o=o)
    if tolerance is None:
        connection.execute(f"create temp view differing as {differing}")
        connection.execute(_FIRST_KV.format(differing="differing"))
    else:
        schema: pa.Schema | None = None
        first: dict[int, dict[str, Any]] = {}
        for batch in connection.sql(differing).to_arrow_reader(65_536):
            schema = batch.schema
            for row in _beyond(batch, dtype, tolerance):
                known = first.get(row["pair"])
                if known is None or (row["b_event"], row["position"]) < (known["b_event"], known["position"]):
                    first[row["pair"]] = row
        if first and schema is not None:
            connection.register("differing", pa.Table.from_pylist(list(first.values()), schema=schema))
            connection.execute(_FIRST_KV.format(differing="differing"))
    return _number(connection, "select count(*) from a_bytes semi join b_bytes using (pair, pool_group, position)")


def _beyond(batch: pa.RecordBatch, dtype: str, tolerance: float) -> Iterator[dict[str, Any]]:
    """Yield the first row of each pair in a batch whose values differ by more than the tolerance."""
    lengths = np.array([len(value) for value in batch.column("a_bytes").to_pylist()])
    chosen: list[int] = []
    for width in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == width)
        sides = []
        for name in ("a_bytes", "b_bytes"):
            data = b"".join(batch.column(name).take(pa.array(rows)).to_pylist())
            sides.append(np.frombuffer(data, np.uint8).reshape(len(rows), width))
        chosen += rows[beyond(sides[0], sides[1], dtype, tolerance)].tolist()
    order = batch.take(pa.array(sorted(chosen), pa.int64()))
    seen: set[int] = set()
    for row in order.sort_by([("b_event", "ascending"), ("position", "ascending")]).to_pylist():
        if row["pair"] not in seen:
            seen.add(row["pair"])
            yield row
