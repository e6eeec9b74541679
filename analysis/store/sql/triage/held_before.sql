-- Which request held this slot before?
-- section: first
select
    lives.to_event is null or lives.to_event >= :event as at_the_damage,
    lives.holder, lives.request, lives.began, lives.from_forward, lives.to_forward, lives.ended
from lifetimes_between(:slot, :slot) as lives
where lives.pool_group = :pool_group and lives.from_event <= :event
order by at_the_damage desc, lives.from_event desc
limit 6
-- section: overall
select
    case when writer_request_id < 0 then 'nobody in this trace'
        when writer_request_id = request_id then 'the request itself' else 'another request' end as last_written_by,
    count(distinct (pool_group, slot)) as slots, count(distinct request_id) as requests,
    sum(num_forwards)::bigint as found
from damage
where source = 'violation'
group by last_written_by
order by found desc
