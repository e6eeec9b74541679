-- One row a run of slots that an alloc, free or evict names: slot_start, slot_count. An alloc's status: '' fresh from
-- the pool, shared (joined), cached (handed to the prefix cache).
with told as (
    select
        trace, event, kind, status, request_id, req_pool_indices[1] as req_pool_idx, note,
        unnest(slot_group) as pool_group,
        -- absurd slots must not overflow where they are added
        unnest(list_transform(slot_start, lambda s: greatest(least(s, 1::bigint << 61), -1))) as slot_start,
        unnest(list_transform(slot_count, lambda n: greatest(least(n, 1::bigint << 61), -1))) as slot_count
    from raw_events
    where kind in ('alloc', 'free', 'evict')
)
select trace, event, told.kind, told.status, told.request_id, events.request, req_pool_idx, told.note, pool_group, slot_start,
    slot_count, events.last_forward, events.next_forward
from told
join events using (trace, event)
