-- slot_history(slot, in_group := 0): all that happened to a slot, in order: writes, allocations, frees, copies,
-- transfers, sweeps, changes without a write, and what the replay found. The slot is in the group's own numbering.
create or replace macro slot_history(which_slot, in_group := 0) as table
select history.event, coalesce(history.forward, events.last_forward) as forward, history.what,
    nullif(history.request_id, -1) as request_id, requests.name as request, history.position, history.token, history.detail,
    history.trace
from (
    select trace, event, forward, 'written' as what, request_id, position, token, '' as detail
    from slot_writes
    where slot = which_slot and slot_writes.pool_group = in_group
    union all
    select trace, event, null, kind, request_id, null, null, concat_ws(' ', nullif(status, ''), nullif(note, ''))
    from slot_events
    where slot_events.pool_group = in_group and which_slot between slot_start and slot_start + slot_count - 1
    union all
    select trace, event, null, 'copied to', null, null, null,
        concat('from ', case src_tier when 0 then 'slot ' else 'host slot ' end, src_start + which_slot - dst_start, ' ', note)
    from copies
    where copies.pool_group = in_group and dst_tier = 0 and which_slot between dst_start and dst_start + slot_count - 1
    union all
    select trace, event, null, 'copied from', null, null, null,
        concat('to ', case dst_tier when 0 then 'slot ' else 'host slot ' end, dst_start + which_slot - src_start, ' ', note)
    from copies
    where copies.pool_group = in_group and src_tier = 0 and which_slot between src_start and src_start + slot_count - 1
    union all
    select trace, event, forward, concat(direction, ' ', status), request_id, position + which_slot - slot_start, null,
        concat('room ', room)
    from transfer_slots
    where transfer_slots.pool_group = in_group and which_slot between slot_start and slot_start + slot_count - 1
    union all
    select trace, event, forward, 'swept', null, position, null, case locked when 1 then 'locked' else '' end
    from sweeps
    where sweeps.pool_group = in_group and slot = which_slot
    union all
    select trace, event, forward, 'changed without a write', null, null, null, concat(half, ', layer ', layer, ', ', phase)
    from kv_changes
    where kv_changes.pool_group = in_group and slot = which_slot
    union all
    select trace, event, forward, source, request_id, position, nullif(min(stored_token), -1),
        concat_ws(' x', what, nullif(count(*), 1)::varchar)
    from damage_forwards as damage
    where damage.pool_group = in_group and slot = which_slot
    group by trace, event, forward, source, request_id, position, what
) as history
left join events using (trace, event)
left join requests on requests.trace = history.trace and requests.request_id = history.request_id
order by history.trace, history.event, what
