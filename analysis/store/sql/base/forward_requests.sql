-- One row a forward and request of its batch: row, tokens before (prefix_len) and in this forward (extend_len); what
-- attention got of it (attention_seq_len, attention_query_len), null where nobody read it.
with batch as (
    select
        trace, forward, event, runner, mode,
        unnest(range(len(req_pool_indices))) as batch_index,
        unnest(req_pool_indices) as req_pool_idx,
        unnest(request_ids) as request_id,
        unnest(prefix_lens) as prefix_len,
        unnest(extend_lens) as extend_len,
        unnest(attention_seq_lens) as seq_len,
        unnest(attention_query_lens) as query_len
    from raw_events
    where kind = 'forward'
)
-- absurd lengths, of a damaged engine, must not overflow where they are added
select
    trace, forward, event, runner, mode, batch_index, request_id, request_name(name, request_id) as request, req_pool_idx,
    greatest(least(prefix_len, 1::bigint << 61), -1) as prefix_len,
    greatest(least(extend_len, 1::bigint << 61), -1) as extend_len,
    case when seq_len >= 0 then least(seq_len, 1::bigint << 61) end as attention_seq_len,
    case when query_len >= 0 then least(query_len, 1::bigint << 61) end as attention_query_len
from batch
left join _request_names using (trace, request_id)
where req_pool_idx <> 0
