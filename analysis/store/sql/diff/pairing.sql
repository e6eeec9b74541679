-- Which request of one trace is which of the other, and how each ended.

-- section: known
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

-- section: pairs
-- Requests of one key are paired by name where they have the same, the others in the order in which they came; where some
-- may be lost, only if there are as many on both sides.
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

-- section: ends
-- How far a request got in the target, and what became of it. The last verify forward writes guesses nobody heard of.
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

-- section: lengths
insert into firsts
select pair, 'length', 0, -1, least(a.got, b.got), {end}, -1, -1, -1, -1,
    a.got || ' tokens' || if(a.status <> '', ', ' || a.status, ''),
    b.got || ' tokens' || if(b.status <> '', ', ' || b.status, '')
from pairs join a_ends as a on a.request_id = a_id join b_ends as b on b.request_id = b_id
where {judged} and not (a.status = 'aborted' and b.status = 'aborted')
    and abs(a.got - b.got) > {slack} + greatest(a.guesses, b.guesses)

-- section: unfinished
select count(*) from pairs join a_ends as a on a.request_id = a_id join b_ends as b on b.request_id = b_id
where not ({judged})

-- section: missing
insert into firsts
select -2 - row_number() over (order by event), 'missing', 0, -1, -1, {at}, {a_event}, -1, {b_event}, -1,
    {a}, {b}
from {s}_known where ran and request_id not in (select {s}_id from pairs)
    and ({sure} or (was_known and prompt_hash is not null and prompt_hash not in ({others})))
