-- The first place where two traces part, for each pair of requests and each kind. Every insert adds to the table `firsts`.
-- `seen` is the event of B at which the difference shows, by which differences are ordered.

-- section: firsts
create table firsts (
    pair bigint, kind varchar, runner integer, pool_group integer, position bigint, seen bigint,
    a_event bigint, a_forward bigint, b_event bigint, b_forward bigint, a varchar, b varchar
)

-- section: kept_guesses
-- Rejected guesses of a target are nobody's tokens; of those accepted, the last write at a position counts. Where something
-- was lost before the request's next forward, nobody knows what became of its guesses.
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

-- section: with_kept
left join {s}_kept on k_request = t.request_id and k_position = position and k_event = event
where guess in (0, 3) or k_event is not null{drafts}

-- section: facts
create table {s}_facts as
select pair, runner, position, round, if(guess = 2, -1, token) as token, fed - position as off,
    if(guess = 2, 0, reads) as reads, misreads, bool_or(unsure <> 0) as unsure, min(event) as event,
    arg_min(forward, event) as forward
from {s}_tokens as t join pairs on pairs.{s}_id = t.request_id
{kept}
group by all

-- section: places
create table places as
with only_a as (from a_facts anti join b_facts using (pair, runner, position, round, token, off, reads, misreads)),
only_b as (from b_facts anti join a_facts using (pair, runner, position, round, token, off, reads, misreads)),
spots as (select pair, runner, position, round from only_a union select pair, runner, position, round from only_b),
a as (
    select pair, runner, position, round, list_sort(list(distinct token)) as tokens, list_sort(list(distinct off)) as offs,
        list_sort(list(distinct reads)) as contents, list_sort(list(distinct misreads)) as wrongs,
        bool_or(unsure) as unsure
    from a_facts semi join spots using (pair, runner, position, round) group by all
),
b as (
    select pair, runner, position, round, list_sort(list(distinct token)) as tokens, list_sort(list(distinct off)) as offs,
        list_sort(list(distinct reads)) as contents, list_sort(list(distinct misreads)) as wrongs,
        bool_or(unsure) as unsure, min(event) as event, arg_min(forward, event) as forward
    from b_facts semi join spots using (pair, runner, position, round) group by all
),
odd_a as (select pair, runner, position, round, min(event) as event, arg_min(forward, event) as forward from only_a group by all),
odd_b as (select pair, runner, position, round, min(event) as event, arg_min(forward, event) as forward from only_b group by all)
select a.pair, a.runner, a.position, a.round, a.tokens as a_tokens, b.tokens as b_tokens, a.offs as a_offs,
    b.offs as b_offs, a.contents <> b.contents and not a.unsure and not b.unsure as other_content,
    a.wrongs <> b.wrongs and not (a.unsure and a.wrongs = [0]) and not (b.unsure and b.wrongs = [0]) as other_wrongs,
    odd_a.event as a_event, odd_a.forward as a_forward, coalesce(odd_b.event, b.event) as b_event,
    coalesce(odd_b.forward, b.forward) as b_forward
from a join b using (pair, runner, position, round) left join odd_a using (pair, runner, position, round) left join odd_b using (pair, runner, position, round)

-- section: compared
select count(*) from a_facts semi join b_facts using (pair, runner, position, round)

-- section: first_places
insert into firsts
select pair, '{kind}', r.runner, -1, r.position, r.b_event, r.a_event, r.a_forward, r.b_event, r.b_forward, {a}, {b}
from (
    select pair, arg_min(p, (b_event, position)) as r
    from (select pair, p, p.b_event as b_event, p.position as position from places as p where {where}) group by pair
)

-- section: sampled
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

-- section: common_samples
select count(*) from (
    select pair, position from a_samples join pairs on pairs.a_id = request_id where position >= prompt_len
    intersect
    select pair, position from b_samples join pairs on pairs.b_id = request_id where position >= prompt_len
)

-- section: prompts
insert into firsts
select pair, 'input', 0, -1, -1, b_event, a_event, -1, b_event, -1, 'one prompt', 'another prompt' from pairs
where a_prompt <> b_prompt
    and not exists (from firsts where firsts.pair = pairs.pair and kind = 'input')

-- section: bytes
create table {s}_{facts}_bytes as
with ordered as (
    select pair, {key}, event, forward, bytes
    from {s}_{facts} as t join pairs on pairs.{s}_id = t.request_id
    {kept}
)
select pair, {key}, arg_{which}(bytes, event) as bytes, {which}(event) as event, arg_{which}(forward, event) as forward
from ordered group by all

-- section: byte_pairs
select pair, {key}, a.event as a_event, a.forward as a_forward, b.event as b_event, b.forward as b_forward,
    a.bytes as a_bytes, b.bytes as b_bytes
from a_{facts}_bytes as a join b_{facts}_bytes as b using (pair, {key}) where a.bytes <> b.bytes

-- section: not_again
-- Of a trace with losses the first write may be lost, and what is left be what the other trace wrote later on.
    and not exists (
        from {o}_{facts} as t join pairs on pairs.{o}_id = t.request_id
        where pairs.pair = {s}.pair and {same} and t.bytes = {s}.bytes
    )

-- section: bytes_compared
select count(*) from a_{facts}_bytes semi join b_{facts}_bytes using (pair, {key})

-- section: first_bytes
insert into firsts
select pair, '{kind}', -1, r.pool_group, r.position, r.b_event, r.a_event, r.a_forward, r.b_event, r.b_forward,
    {where} || hex(r.a_bytes), {where} || hex(r.b_bytes)
from (select d.pair, arg_min(d, (d.b_event, d.position)) as r from {differing} as d group by d.pair)

-- section: changed
insert into firsts
with odd as (
    select '{s}' as side, c.*, pairs.pair from {s}_changes as c left join pairs on pairs.{s}_id = c.request_id
    anti join {o}_changes as other on other.pool_group = c.pool_group and other.content = c.content
)
select coalesce(pair, -1), 'kv_changed', -1, r.pool_group, r.position, {at}, {a_place}, {b_place}, {a}, {b}
from (select pair, arg_min(odd, (event, position)) as r from odd group by pair)
where pair is not null or {whole}

-- section: layer_changed
-- Bytes of a layer that changed in one trace, where the other's slot shows them, too.
insert into firsts
with changed as (
    select c.*, pairs.pair from {s}_layer_changes as c join pairs on pairs.{s}_id = c.request_id
),
others as (
    select c.*, pairs.pair from {o}_layer_changes as c join pairs on pairs.{o}_id = c.request_id
),
odd as (
    from changed semi join {o}_layers_bytes using (pair, pool_group, position, half, layer, piece)
    anti join others using (pair, pool_group, position, half, layer, piece)
)
select pair, 'layer_changed', -1, r.pool_group, r.position, {at}, {a_place}, {b_place}, {a}, {b}
from (select odd.pair, arg_min(odd, (odd.event, odd.position)) as r from odd group by odd.pair)

-- section: context
-- Other content after another token is its consequence; without one, a wrong slot was read from the very first.
delete from firsts as c where kind = 'context' and exists (
    from firsts as o where o.pair = c.pair and o.kind <> 'context' and o.seen <= c.seen
)

-- section: first_pairs
-- The requests that differ first, each with its differences in order.
with order_of as (
    select pair, min((seen, a_event, case kind {places} end)) as o from firsts group by pair order by o limit {limit}
)
select firsts.*, coalesce(a_label, '') as a_label, coalesce(b_label, '') as b_label, order_of.o
from firsts join order_of using (pair) left join pairs using (pair)
order by order_of.o, firsts.pair, seen, case kind {places} end, position

-- section: misread
-- What a request read in an event that was not its own.
select m.*, coalesce(k.label, '') as writer_label from {s}_misreads as m left join {s}_known as k
on k.request_id = m.writer where m.request_id = ? and m.runner = ? and m.event = ? limit 1
