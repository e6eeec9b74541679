-- What the requests found damaged: stretches of forwards by position.
with found as (
    select request_id, position, slot, forward, :class as class, count(*) as rows_found
    from damage_forwards
    where request_id in (:requests) and forward >= 0
    group by all
),
begun as (
    select *, coalesce(forward - lag(forward) over each_position > :gap, true) as begins
    from found
    window each_position as (partition by request_id, position, class order by forward)
),
stretches as (
    select *, sum(begins::int) over (partition by request_id, position, class order by forward) as stretch from begun
)
select request_id, position, min(slot) as slot, class, min(forward) as from_forward, max(forward) as to_forward,
    sum(rows_found)::bigint as found
from stretches
group by request_id, position, class, stretch
order by from_forward, request_id, position, class
limit :limit
