-- Merged violations back to one row a forward. rows: a report's, in its order; events: the trace's; ranks: the order of an
-- event's launches.
-- section: given
create temp table given as
select
    rows.rowid as number, rows.*, coalesce(ranks.swept, false) as swept, coalesce(launch_rank, 0) as launch_rank
from rows
left join ranks
    on ranks."group" = rows."group" and ranks.launch_tag = rows.launch_tag
    and is_write = ((fail_reason_bits & {writes}) <> 0)::bigint;
create temp view told as from events where kind in ('forward', 'sweep')
-- section: turns
-- a row goes on in the next forwards of its runner that hold its request on its row, of a sweep in the runner's next sweeps
create temp table turns as
with lasting as (
    select distinct runner, request_id, req_pool_idx, swept from given where num_forwards > 1
),
held as (
    -- an event that contradicts itself was not replayed
    select runner, unnest(request_ids) as request_id, unnest(req_pool_indices) as req_pool_idx, false as swept, event
    from told
    where kind = 'forward' and len(request_ids) = len(req_pool_indices)
    union all
    select runner, -1, -1, true, event from told where kind = 'sweep'
)
select
    *, row_number() over each_in_turn as turn,
    count(*) over (partition by runner, request_id, req_pool_idx, swept) as turns
from (select distinct * from held semi join lasting using (runner, request_id, req_pool_idx, swept))
window each_in_turn as (partition by runner, request_id, req_pool_idx, swept order by event)
-- section: found
create temp table found as
with first_turns as (
    select given.number, given.event as first_event, turns.* exclude (event), num_forwards
    from given
    join turns using (runner, request_id, req_pool_idx, swept, event)
    where num_forwards > 1
),
asked as (
    select * replace (unnest(range(turn, least(turn + num_forwards, turns + 1))) as turn) from first_turns
)
select number, turns.event, turns.event <> first_event as goes_on
from asked
join turns using (runner, request_id, req_pool_idx, swept, turn)
union all
select number, event, false from given where num_forwards = 1
-- section: wrong
-- what does not fit the trace, in the report's order: what is wrong, the row's event, and the event before it
with spans as (
    select number, count(*) as times, max(event) as last_event from found group by number
),
ends as (select min(event) as first_event, max(event) as last_event from events)
select
    case
        when given.num_forwards < 1 or given.event < greatest(before, first_event) then 'order'
        when times is null and given.event <= ends.last_event then 'request'
        when times is null or times < given.num_forwards or given.event > ends.last_event then 'few'
        else 'end'
    end as wrong,
    given.event, greatest(before, first_event) as before
from (select *, lag(event) over (order by number) as before from given) as given
cross join ends
left join spans using (number)
left join told on told.event = spans.last_event
where times is distinct from given.num_forwards or given.event < greatest(before, first_event) or given.event > ends.last_event
    or (given.num_forwards > 1 and told.forward <> given.last_forward)
order by number
limit 1
-- section: rows
-- In a launch in which every row begins the report's order is theirs; else the batch's, or the sweep's, and by position.
with swept_places as (
    select event, groups as "group", slots as slot, positions as expected_position, min(place) as place
    from (
        select
            event, unnest(sweep_group) as groups, unnest(sweep_slot) as slots, unnest(sweep_position) as positions,
            unnest(range(len(sweep_slot))) as place
        from told
        where kind = 'sweep'
    )
    group by all
),
placed as (
    select
        given.* exclude (event), found.event, goes_on,
        bool_or(goes_on) over (partition by found.event, launch_rank) as mixed
    from found
    join given using (number)
)
select placed.* replace (
        case when goes_on then told.forward else placed.forward end as forward,
        case when goes_on then told.time_ns else placed.time_ns end as time_ns,
        case when told.kind = 'sweep' then 'sweep' else coalesce(told.mode, placed.mode) end as mode,
        case when goes_on then told.forward else placed.forward end as first_forward,
        case when goes_on then told.forward else placed.forward end as last_forward,
        1::bigint as num_forwards)
from placed
left join told using (event)
left join swept_places using (event, "group", slot, expected_position)
order by
    event, launch_rank,
    case when mixed then coalesce(case when swept then place else list_position(told.req_pool_indices, req_pool_idx) end, 1 << 40) end,
    case when mixed and not swept then expected_position end,
    number
