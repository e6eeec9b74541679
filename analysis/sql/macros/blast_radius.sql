-- blast_radius(from_forward := 0): how far damage spread, request by request, in the order in which it reached them.
create or replace macro blast_radius(from_forward := 0) as table
select trace, nullif(request_id, -1) as request_id, any_value(request) as request, min(forward) as first_forward,
    max(forward) as last_forward, count(distinct forward) as forwards, count(distinct (pool_group, slot)) as slots,
    count(*) as found, string_agg(distinct what, ', ') as kinds
from damage
where forward >= from_forward
group by trace, damage.request_id
order by trace, first_forward, found desc
