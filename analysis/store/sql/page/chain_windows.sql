-- Forwards whose reads of :title show the most: for each request the first in which anything was found, and the one in
-- which the most positions and kinds were.
with seen as (
    select request_id, any_value(request) as request, event, forward, pool_group, min(expected_position) as first_position,
        max(expected_position) as last_position, count(distinct expected_position) as positions,
        bit_count(bit_or(fail_reason_bits)) as reasons
    from violation_forwards
    where :where
    group by request_id, event, forward, pool_group
),
ranked as (
    select *, row_number() over (partition by request_id order by event, pool_group) as by_time,
        row_number() over (partition by request_id order by reasons desc, positions desc, event, pool_group) as by_weight,
        min(event) over (partition by request_id) as reached
    from seen
)
select request_id, request, event, forward, pool_group, first_position, last_position, positions, by_time = 1 as is_first
from ranked
where by_time = 1 or by_weight = 1
order by reached, request_id, by_time
limit :limit
