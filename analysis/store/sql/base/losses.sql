-- One row a place where events were dropped while recording; lost_events is null where nobody knows how many.
select
    trace, event, time_ns, nullif(lost_events, -1) as lost_events, status = 'slots_listed' as slots_listed,
    coalesce(try_cast(list_sum(slot_count) as bigint), 0) as num_slots, note
from raw_events
where kind = 'loss' and status <> 'late'
