-- The requests of :title, in the order in which the damage reached them.
select request_id, any_value(request) as request, min(forward) as first_forward, max(last_forward) as last_forward,
    sum(num_forwards)::bigint as found
from damage
where request_id >= 0 and :where
group by request_id
order by first_forward, found desc, request_id
limit :limit
