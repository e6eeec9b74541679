-- Prefill or decode side?
-- section: first
select role, ':mode' as seen_in, writer.mode as written_in, writer.forward as writer_forward, ':writer_request' as written_by
from traces
left join forwards as writer on writer.trace = traces.trace and writer.forward = :writer_forward
where :writer_forward >= 0
-- section: overall
select
    traces.role, coalesce(writer.mode, '') as written_in, damage.mode as seen_in, count(distinct request_id) as requests,
    min(damage.forward) as first_forward, count(*) as found
from damage_forwards as damage
join traces using (trace)
left join forwards as writer on writer.trace = damage.trace and writer.forward = damage.writer_forward
group by all
order by first_forward, found desc
limit 8
