-- lifetimes_between(first_slot, last_slot): slot_lifetimes of some slots, without looking at the others.
create or replace macro lifetimes_between(first_slot, last_slot) as table
with promised as (select trace from traces where slot_history = 'complete'),
told as (
    select
        trace, pool_group,
        unnest(range(greatest(0, slot_start, first_slot), least(slot_start + slot_count, last_slot + 1, num_slots))) as slot, event, next_forward, last_forward,
        request_id, request,
        case when kind <> 'alloc' then kind when status = '' then 'alloc' else status end as what
    from slot_events
    join (select trace, pool_group, num_slots from pool_groups) using (trace, pool_group)
    where slot_start <= last_slot and slot_start + slot_count > first_slot
),
points as (
    select trace, pool_group, slot, event, next_forward, last_forward, request_id, request, what
    from told
    where (what <> 'shared' and trace in (from promised)) or what in ('free', 'evict')
    union all
    select trace, pool_group, slot, event, forward, forward, request_id, request, 'write'
    from slot_writes
    where trace not in (from promised) and slot between first_slot and last_slot
),
-- a request that goes on writing its slot begins nothing
changes as (
    select *
    from points
    window by_slot as (partition by trace, pool_group, slot order by event)
    qualify what <> 'write' or not coalesce(
        lag(what) over by_slot = 'write' and lag(request_id) over by_slot = request_id, false)
),
exclusive as (
    select
        trace, pool_group, slot,
        case when what = 'cached' or (what = 'alloc' and request_id < 0) then 'cache'
            when what = 'write' then 'last writer' else 'request' end as holder,
        case when what = 'cached' then -1 else request_id end as request_id,
        case when what <> 'cached' then request end as request,
        case when what = 'cached' then request_id end as given_by,
        what as began, lead(what) over by_slot as ended,
        event as from_event, lead(event) over by_slot as to_event,
        next_forward as from_forward,
        case lead(what) over by_slot
            when 'write' then lead(last_forward) over by_slot - 1 else lead(last_forward) over by_slot end as to_forward,
        what
    from changes
    window by_slot as (partition by trace, pool_group, slot order by event)
),
-- what a request shares it shares until its row is given back, or the slot is
ends as (
    select trace, pool_group, slot, event, last_forward, what from told where what in ('free', 'evict')
),
leaving as (
    select statuses.trace, statuses.request_id, statuses.event, events.last_forward, statuses.status
    from statuses
    join events using (trace, event)
    where statuses.status <> 'admitted'
),
shared as (
    select joined.trace, joined.pool_group, joined.slot, joined.request_id, joined.request, joined.event, joined.next_forward,
        leaving.event as left_event, leaving.last_forward as left_forward, leaving.status as left_how,
        ends.event as end_event, ends.last_forward as end_forward, ends.what as end_how
    from (from told where what = 'shared') as joined
    asof left join leaving
        on joined.trace = leaving.trace and joined.request_id = leaving.request_id and joined.event < leaving.event
    asof left join ends
        on joined.trace = ends.trace and joined.pool_group = ends.pool_group and joined.slot = ends.slot
        and joined.event < ends.event
)
select pool_group, slot, holder, request_id, request, began, ended, from_event, to_event, from_forward, to_forward, given_by,
    trace
from exclusive
where what not in ('free', 'evict')
union all
select
    pool_group, slot, 'request', request_id, request, 'shared',
    case when end_event < coalesce(left_event, end_event + 1) then end_how else left_how end,
    event, least(left_event, end_event), next_forward,
    case when end_event < coalesce(left_event, end_event + 1) then end_forward else left_forward end,
    null, trace
from shared
