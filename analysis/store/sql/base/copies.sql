-- One row a run of copied slots (fork, offload, load-back); tier 0 is the pool, 1 the host.
with told as (
    select
        trace, event, note,
        unnest(copy_group) as pool_group,
        unnest(copy_src_tier) as src_tier, unnest(list_transform(copy_src, lambda s: greatest(least(s, 1::bigint << 61), -1))) as src_start,
        unnest(copy_dst_tier) as dst_tier, unnest(list_transform(copy_dst, lambda s: greatest(least(s, 1::bigint << 61), -1))) as dst_start,
        unnest(list_transform(copy_count, lambda s: greatest(least(s, 1::bigint << 61), -1))) as slot_count
    from raw_events
    where kind = 'kv_copy'
)
select told.*, events.last_forward, events.next_forward
from told
join events using (trace, event)
