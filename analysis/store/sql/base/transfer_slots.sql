-- One row a run of slots of a transfer event, position being that of its first slot.
with told as (
    select
        trace, event, forward, mode as direction, status, room, request_id, prefix_lens[1] as start_position,
        unnest(slot_group) as pool_group,
        -- absurd slots must not overflow where they are added
        unnest(list_transform(slot_start, lambda s: greatest(least(s, 1::bigint << 61), -1))) as slot_start,
        unnest(list_transform(slot_count, lambda n: greatest(least(n, 1::bigint << 61), -1))) as slot_count,
        unnest(range(len(slot_start))) as run,
        unnest(list_transform(range(len(slot_count)), lambda i: coalesce(try_cast(list_sum(slot_count[1:i]) as bigint), 0))) as before
    from raw_events
    where kind = 'transfer'
)
select trace, event, forward, direction, status, room, request_id, request_name(name, request_id) as request, pool_group,
    slot_start, slot_count, run, least(start_position, 1::bigint << 61) + least(before, 1::bigint << 61) as position
from told
left join _request_names using (trace, request_id)
