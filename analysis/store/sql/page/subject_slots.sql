-- The slots of :title, in the order in which the damage reached them.
select pool_group, slot, min(forward) as first_forward, max(last_forward) as last_forward, sum(num_forwards)::bigint as found,
    count(distinct request_id) as requests, string_agg(distinct what, ', ' order by what) as what
from damage
where slot >= 0 and :where
group by pool_group, slot
order by first_forward, min(event), pool_group, slot
limit :limit
