-- One row a slot whose bytes changed without a write: phase before (seen before the forward ran) or after.
with told as (
    select
        trace, event, kind, forward, runner,
        unnest(kv_change_stream) as stream, unnest(kv_change_slot) as slot,
        unnest(list_transform(kv_change_phase, lambda p: case p when 0 then 'before' else 'after' end)) as phase
    from raw_events
    where len(kv_change_slot) > 0
)
select told.*, streams.pool_group, streams.half, streams.layer
from told
left join streams using (trace, runner, stream)
