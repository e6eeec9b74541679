-- One row a run of slots that an alloc, free or evict names: slot_start, slot_count. An alloc's status: '' fresh from
-- the pool, shared (joined), cached (handed to the prefix cache).
with told as (
    select
        trace, event, kind, status, request_id, req_pool_indices[1] as req_pool_idx, note,
        unnest(slot_group) as pool_group, unnest(slot_start) as slot_start, unnest(slot_count) as slot_count
    from raw_events
    where kind in ('alloc', 'free', 'evict')
)
select told.*, events.last_forward, events.next_forward
from told
join events using (trace, event)
