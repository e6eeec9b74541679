-- One row a run of slots of a transfer event, position being that of its first slot.
with told as (
    select
        trace, event, forward, mode as direction, status, room, request_id, prefix_lens[1] as start_position,
        unnest(slot_group) as pool_group, unnest(slot_start) as slot_start, unnest(slot_count) as slot_count,
        unnest(range(len(slot_start))) as run,
        unnest(list_transform(range(len(slot_count)), lambda i: coalesce(list_sum(slot_count[1:i]), 0)::bigint)) as before
    from raw_events
    where kind = 'transfer'
)
select * exclude (before, start_position), start_position + before as position
from told
