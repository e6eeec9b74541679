-- Which forward first wrote it?
-- section: first
select forward, mode, request, position, token, which
from (
    select
        writes.forward, forwards.mode, requests.name as request, writes.position, writes.token,
        row_number() over (order by writes.event) as number, row_number() over (order by writes.event desc) as from_end,
        case when from_end = 1 then 'last before the damage' when number = 1 then 'first' else '' end as which
    from slot_writes as writes
    left join forwards using (trace, forward)
    left join requests using (trace, request_id)
    where writes.slot = :slot and writes.pool_group = :pool_group and writes.event <= :event
)
where number = 1 or from_end <= 4
order by number
-- section: overall
select
    writer_forward, any_value(forwards.mode) as mode, any_value(writer_request) as request,
    count(distinct (pool_group, slot)) as slots, min(damage.forward) as first_seen,
    sum(num_forwards)::bigint as found
from damage
left join forwards on forwards.trace = damage.trace and forwards.forward = writer_forward
where source = 'violation' and writer_forward >= 0
group by writer_forward
order by first_seen, writer_forward
limit 6
