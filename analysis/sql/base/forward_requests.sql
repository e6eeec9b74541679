-- One row a forward and request of its batch: row, tokens before (prefix_len) and in this forward (extend_len).
with batch as (
    select
        trace, forward, event, runner, mode,
        unnest(range(len(req_pool_indices))) as batch_index,
        unnest(req_pool_indices) as req_pool_idx,
        unnest(request_ids) as request_id,
        unnest(prefix_lens) as prefix_len,
        unnest(extend_lens) as extend_len
    from raw_events
    where kind = 'forward'
)
-- absurd lengths, of a damaged engine, must not overflow where they are added
select
    trace, forward, event, runner, mode, batch_index, request_id, req_pool_idx,
    greatest(least(prefix_len, 1::bigint << 61), -1) as prefix_len,
    greatest(least(extend_len, 1::bigint << 61), -1) as extend_len
from batch
where req_pool_idx <> 0
