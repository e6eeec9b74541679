-- table_diff(request, from_forward, to_forward): how a request's row of the block table changed between two forwards, the
-- ordinary writes of its own forwards included: position, slot before and after, and since which forward.
create or replace macro table_diff(which_request, from_forward, to_forward) as table
select table_index, position, before.slot as from_slot, after.slot as to_slot,
    case when before.slot is null then 'added' when after.slot is null then 'gone' else 'moved' end as what,
    after.how, after.event, after.forward, request_id, coalesce(after.request, before.request) as request, trace
from block_table(which_request, from_forward) as before
full join block_table(which_request, to_forward) as after using (trace, request_id, table_index, position)
where before.slot is distinct from after.slot
order by trace, request_id, table_index, position
