-- What was found, by kind.
select source, what, :class as class, sum(num_forwards)::bigint as found, count(distinct nullif(request_id, -1)) as requests,
    count(distinct (pool_group, slot)) filter (where slot >= 0) as slots, min(forward) as first_forward,
    max(last_forward) as last_forward
from damage
group by source, what
order by min(event), found desc, what
limit :limit
