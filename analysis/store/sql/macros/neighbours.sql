-- neighbours(slot, in_group := 0, reach := 8): the slots around one: who wrote each last, and how often it was found bad.
create or replace macro neighbours(which_slot, in_group := 0, reach := 8) as table
with written as (
    select trace, slot, arg_max({forward: forward, request_id: request_id, position: position, token: token}, event) as w
    from slot_writes
    where slot_writes.pool_group = in_group and slot between which_slot - reach and which_slot + reach
    group by all
),
bad as (
    select trace, slot, sum(num_forwards)::bigint as found, min(forward) as first_bad_forward
    from damage
    where damage.pool_group = in_group and slot between which_slot - reach and which_slot + reach
    group by all
)
select slot, slot - which_slot as distance, w.forward as written_in, w.request_id as request_id,
    requests.name as request, w.position as position, w.token as token, coalesce(bad.found, 0) as found,
    bad.first_bad_forward, trace
from written
full join bad using (trace, slot)
left join requests on requests.trace = trace and requests.request_id = w.request_id
order by trace, slot
