-- How many slots of a pool group are held by anybody, whenever that changes. A slot that several hold counts once. Without a
-- slot history (has_history is false) nobody knows: what was written and not given back since.
with ends as (
    select trace, pool_group, slot, from_event as event, 1 as step from slot_lifetimes
    union all
    select trace, pool_group, slot, to_event, -1 from slot_lifetimes where to_event is not null
),
holders as (
    select *, sum(step) over (
        partition by trace, pool_group, slot order by event, step desc rows unbounded preceding
    ) as holders
    from ends
),
changes as (
    select trace, pool_group, event,
        sum(case when step = 1 and holders = 1 then 1 when step = -1 and holders = 0 then -1 else 0 end) as change
    from holders
    group by all
)
select trace, pool_group, time_ns, sum(change) over (partition by trace, pool_group order by event)::bigint as held,
    slot_history = 'complete' as has_history
from changes
join events using (trace, event)
join (select trace, slot_history from traces) using (trace)
where time_ns > 0
order by trace, pool_group, event
