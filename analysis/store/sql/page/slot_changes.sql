-- Slots whose bytes changed although nobody wrote them: phase says whether before or after the forward's own work.
select pool_group, slot, forward, half, layer, phase, count(*) as changes
from kv_changes
where forward >= 0 and :slots
group by pool_group, slot, forward, half, layer, phase
order by abs(forward - :forward), pool_group, slot, forward
limit :limit
