-- What differs beside tokens, tables and leading bytes: what both traces saw of identities, windows, states, values and layers.

-- section: identities
-- What a request's positions were computed with, from each position on that follows. Of a position that a trace did not
-- compute, its first forward behind it counts.
create table {s}_identity as
select pair, kind, position, known, hash from {s}_identities join pairs on pairs.{s}_id = request_id

-- section: identity_kinds
select distinct kind from {s}_identity where known = 1

-- section: identities_compared
select count(distinct pair) from identity_spots

-- section: identity_spots
create table identity_spots as
with spots as (
    select a.pair, a.kind, a.position, a.known = 1 and b.known = 1 as known, a.hash as a_hash, b.hash as b_hash
    from a_identity as a asof join b_identity as b
    on a.pair = b.pair and a.kind = b.kind and a.position >= b.position
    union
    select b.pair, b.kind, b.position, a.known = 1 and b.known = 1, a.hash, b.hash
    from b_identity as b asof join a_identity as a
    on a.pair = b.pair and a.kind = b.kind and b.position >= a.position
)
select pair, kind, position, a_hash, b_hash from spots where known

-- section: identity_partners
-- Names that only one trace has may be another engine's, or another run's, for the same: each goes with the one that it stands
-- beside most often.
create table identity_partners as
with together as (
    select kind, a_hash, b_hash, count(*) as times, -min(pair) as early from identity_spots
    where a_hash <> 0 and b_hash <> 0 and kind in ({renamed}) group by all
),
apart as (
    from together anti join (select distinct kind, hash as a_hash from b_identity) using (kind, a_hash)
    anti join (select distinct kind, hash as b_hash from a_identity) using (kind, b_hash)
),
of_a as (select kind, a_hash, arg_max(b_hash, (times, early)) as b_hash from apart group by all),
of_b as (select kind, b_hash, arg_max(a_hash, (times, early)) as a_hash from apart group by all)
select kind, a_hash, b_hash from of_a semi join of_b using (kind, a_hash, b_hash)

-- section: identities_renamed
select count(*) from identity_partners

-- section: identity
insert into firsts
with apart as (
    from identity_spots anti join identity_partners using (kind, a_hash, b_hash) where a_hash <> b_hash
),
odd as (
    select r.* from (select s.pair, arg_min(s, (s.position, s.kind)) as r from apart as s group by s.pair)
),
a as (
    select pair, min(t.event) as event, arg_min(t.forward, t.event) as forward
    from odd join pairs using (pair) join a_batches as t on t.request_id = a_id
    where runner = 0 and prefix + extend > position group by all
),
b as (
    select pair, min(t.event) as event, arg_min(t.forward, t.event) as forward
    from odd join pairs using (pair) join b_batches as t on t.request_id = b_id
    where runner = 0 and prefix + extend > position group by all
)
select pair, 'identity', 0, -1, position, b.event, a.event, a.forward, b.event, b.forward,
    if(a_hash = 0, 'no ' || {kinds}[kind + 1], {kinds}[kind + 1] || ' ' || lpad(lower(hex(a_hash)), 16, '0')),
    if(b_hash = 0, 'no ' || {kinds}[kind + 1], {kinds}[kind + 1] || ' ' || lpad(lower(hex(b_hash)), 16, '0'))
from odd join a using (pair) join b using (pair)

-- section: window_reads
-- The first forward that begins at a position, where what its sliding groups read was seen.
create table {s}_window_reads as
select pair, runner, prefix as position, min(event) as event, arg_min(forward, event) as forward
from {s}_batches as t join pairs on pairs.{s}_id = t.request_id where windows = 1 group by all

-- section: windows_compared
select count(*) from a_window_reads join b_window_reads using (pair, runner, position)

-- section: windows
insert into firsts
with reads_a as (
    select pair, pool_group, r.*, 'positions ' || start || ' to ' || start + count - 1 as read
    from a_window_reads as r join pairs using (pair) join a_windows as w
    on w.request_id = a_id and w.runner = r.runner and w.event = r.event
),
reads_b as (
    select pair, pool_group, r.*, 'positions ' || start || ' to ' || start + count - 1 as read
    from b_window_reads as r join pairs using (pair) join b_windows as w
    on w.request_id = b_id and w.runner = r.runner and w.event = r.event
),
spots as (
    select pair, runner, position, pool_group from reads_a union select pair, runner, position, pool_group from reads_b
),
odd as (
    select spots.*, a.event as a_event, a.forward as a_forward, b.event as b_event, b.forward as b_forward,
        coalesce(reads_a.read, 'its window') as a, coalesce(reads_b.read, 'its window') as b
    from spots join a_window_reads as a using (pair, runner, position) join b_window_reads as b using (pair, runner, position)
    left join reads_a using (pair, runner, position, pool_group) left join reads_b using (pair, runner, position, pool_group)
    where reads_a.read is distinct from reads_b.read
)
select pair, 'window', r.runner, r.pool_group, r.position, r.b_event, r.a_event, r.a_forward, r.b_event, r.b_forward, r.a, r.b
from (select odd.pair, arg_min(odd, (odd.b_event, odd.position)) as r from odd group by odd.pair)

-- section: states
-- The first state behind a request's position that a forward left, and the first that one went on from.
create table {s}_state as
select pair, pool, position, list(distinct hash) as hashes,
    arg_min(struct_pack(event := event, forward := forward, hash := hash), event) filter (where wrote = 1) as wrote,
    arg_min(struct_pack(event := event, forward := forward, hash := hash), event) filter (where wrote = 0) as read
from {s}_states join pairs on pairs.{s}_id = request_id group by all

-- section: states_compared
select count(*) from a_state join b_state using (pair, pool, position)

-- section: state
-- What was read is compared with what was left, too, where a trace has no other: it is the same state.
insert into firsts
with matched as (
    select pair, pool, position, a.wrote as a_wrote, b.wrote as b_wrote, coalesce(a.read, a.wrote) as a_read,
        coalesce(b.read, b.wrote) as b_read, a.read is null as a_left, b.read is null as b_left
    from a_state as a join b_state as b using (pair, pool, position)
    where {whole} or not list_has_any(a.hashes, b.hashes)
),
odd as (
    select pair, pool, position, a_wrote as a, b_wrote as b, true as a_left, true as b_left from matched
    where a_wrote.hash <> b_wrote.hash
    union all
    select pair, pool, position, a_read, b_read, a_left, b_left from matched
    where a_read.hash <> b_read.hash
)
select pair, 'state', -1, r.pool, r.position, r.b.event, r.a.event, r.a.forward, r.b.event, r.b.forward,
    if(r.a_left, 'left ', 'read ') || lpad(lower(hex(r.a.hash)), 16, '0'), if(r.b_left, 'left ', 'read ') || lpad(lower(hex(r.b.hash)), 16, '0')
from (select odd.pair, arg_min(odd, (odd.b.event, odd.position)) as r from odd group by odd.pair)

-- section: values
-- Of a part of a prompt only the first value of a kind is recorded: where the other trace has one too in the part that it
-- computed with that position, nobody knows which others there are, unless both parts are the same.
create table {s}_value as
select pair, t.* from {s}_values as t join pairs on pairs.{s}_id = t.request_id and t.kind < {kinds}
{kept}

-- section: values_found
select count(*) from (from a_value union all from b_value)

-- section: values_computed
-- The forward that computed such a position first.
create table {s}_computed as
with firsts_of as (
    select pair, t.request_id, t.runner, t.position, min(t.event) as event
    from {s}_tokens as t join pairs on pairs.{s}_id = t.request_id
    semi join (select pair, runner, position from a_value union select pair, runner, position from b_value)
    using (pair, runner, position)
    {kept}
    group by all
)
select pair, runner, position, event, forward, prefix, extend, written
from firsts_of join {s}_batches using (request_id, runner, event)

-- section: odd_values
-- Rows of zeros are told by a recorder that has seen enough rows of a layer, and none of zeros among them.
create table {s}_odd_values as
select v.pair, v.runner, v.pool_group, v.position, v.event as {s}_event, v.forward as {s}_forward, o.event as {o}_event,
    o.forward as {o}_forward, {said} as {s}, if(w.event is null, 'none', {others_said}) as {o}
from {s}_value as v
semi join {s}_computed using (pair, runner, position, event)
join {o}_computed as o on o.pair = v.pair and o.runner = v.runner and o.position = v.position
left join {o}_value as w on w.pair = v.pair and w.event = o.event and w.pool_group = v.pool_group and w.half = v.half
    and w.kind = v.kind
where case
    when w.event is not null
        then o.prefix = v.prefix and o.extend = v.extend and (w.layer, w.position, w.rows) <> (v.layer, v.position, v.rows)
    else v.kind <> {zeros} or (o.written >= v.written and not exists (
        from {o}_values as z where z.kind = {zeros} and z.pool_group = v.pool_group and z.half = v.half and z.layer = v.layer
            and z.event < o.event
    ))
end

-- section: first_values
insert into firsts
with odd as (from a_odd_values union all by name from b_odd_values)
select pair, 'values', r.runner, r.pool_group, r.position, r.b_event, r.a_event, r.a_forward, r.b_event, r.b_forward, r.a, r.b
from (select odd.pair, arg_min(odd, (odd.b_event, odd.position)) as r from odd group by odd.pair)
