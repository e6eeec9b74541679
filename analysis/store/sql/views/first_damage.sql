-- One row a trace: the first damage that names a slot. Where a violation and a finding share an event, the violation.
select damage.* exclude (last_forward, num_forwards)
from damage
join (select trace, min(event) as event from damage where slot >= 0 group by trace) as earliest using (trace, event)
where slot >= 0
qualify row_number() over (
    partition by trace order by source desc, pool_group, request_id, position, slot, what, number) = 1
