-- What was found in the slots: one row a slot, reader and class for every stretch of forwards without a break of more
-- than :gap.
with found as (
    select pool_group, slot, request_id, request, forward, :class as class, count(*) as rows_found,
        string_agg(distinct what, ', ' order by what) as what
    from damage_forwards
    where :slots
    group by pool_group, slot, request_id, request, forward, class
),
begun as (
    select *, coalesce(forward - lag(forward) over each_reader > :gap, true) as begins
    from found
    window each_reader as (partition by pool_group, slot, request_id, class order by forward)
),
stretches as (
    select *, sum(begins::int) over (partition by pool_group, slot, request_id, class order by forward) as stretch
    from begun
)
select pool_group, slot, nullif(request_id, -1) as request_id, any_value(request) as request, class,
    min(forward) as from_forward, max(forward) as to_forward, sum(rows_found)::bigint as found,
    arg_max(what, (length(what), what)) as what
from stretches
group by pool_group, slot, stretches.request_id, class, stretch
order by from_forward, pool_group, slot, class, stretches.request_id
limit :limit
