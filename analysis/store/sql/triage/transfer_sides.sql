-- Is the source stable and the destination different?
-- section: first
select direction, status, forward, room, pool_group, start_position, num_slots, note
from transfers
where request_id = :request_id
order by event
limit 8
-- section: overall
select
    kind, count(*) as found, sum("count")::bigint as slots, count(distinct request_id) as requests, min(forward) as first_forward,
    arg_min(detail, event) as detail
from findings
where starts_with(kind, 'transfer_')
group by kind
union all
select concat('(', direction, ' ', status, ')'), count(*), sum(num_slots)::bigint, count(distinct request_id), min(forward), ''
from transfers
group by direction, status
order by first_forward, kind
