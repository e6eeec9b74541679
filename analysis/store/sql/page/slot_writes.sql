-- Which forwards wrote the slots, for whom, and what.
select pool_group, slot, forward, writes.request_id, requests.name as request, position, token
from slot_writes as writes
left join requests using (trace, request_id)
where :slots
order by abs(forward - :forward), pool_group, slot, forward
limit :limit
