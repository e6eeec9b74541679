-- Is it the same slot range each time?
-- section: first
select :slot as slot, page_size, :slot // page_size as page, num_slots
from pool_groups
where pool_group = :pool_group
-- section: overall
with slots as (
    select trace, pool_group, slot, sum(num_forwards) as found, min(forward) as first_forward, max(last_forward) as last_forward,
        min(request_id) as some_request, max(request_id) as other_request
    from damage
    where slot >= 0
    group by all
),
islands as (
    select *, slot - row_number() over (partition by trace, pool_group order by slot) as island from slots
)
select
    pool_group, min(slot) as first_slot, max(slot) as last_slot, count(*) as slots, min(first_forward) as first_forward,
    max(last_forward) as last_forward, min(some_request) <> max(other_request) as several_requests,
    sum(found)::bigint as found, count(*) over () as ranges
from islands
group by trace, pool_group, island
order by found desc, first_slot
limit 6
