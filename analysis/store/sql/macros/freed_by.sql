-- freed_by(slot, in_group := 0): who gave a slot back, or evicted it, after which forward, and who had written it last. Without a
-- slot history (traces.slot_history) the engine may have given it back in silence.
create or replace macro freed_by(which_slot, in_group := 0) as table
select freed.event, freed.last_forward as after_forward, freed.kind as what, nullif(freed.request_id, -1) as request_id,
    freed.request, writes.forward as writer_forward, writes.request as writer_request, freed.note, freed.trace
from (
    from slot_events
    where kind in ('free', 'evict') and pool_group = in_group
        and which_slot between slot_start and slot_start + slot_count - 1
) as freed
asof left join (from slot_writes where slot = which_slot and pool_group = in_group) as writes
    on writes.trace = freed.trace and writes.event < freed.event
order by freed.trace, freed.event
