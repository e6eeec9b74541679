-- One row a run of copied slots (fork, offload, load-back); tier 0 is the pool, 1 the host.
with told as (
    select
        trace, event, note,
        unnest(copy_group) as pool_group,
        unnest(copy_src_tier) as src_tier, unnest(copy_src) as src_start,
        unnest(copy_dst_tier) as dst_tier, unnest(copy_dst) as dst_start,
        unnest(copy_count) as slot_count
    from raw_events
    where kind = 'kv_copy'
)
select told.*, events.last_forward, events.next_forward
from told
join events using (trace, event)
