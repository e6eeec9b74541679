-- Slots evicted, by event.
select trace, pool_group, time_ns, sum(slot_count)::bigint as slots
from slot_events
join events using (trace, event)
where slot_events.kind = 'evict' and time_ns > 0
group by all
order by trace, pool_group, time_ns
