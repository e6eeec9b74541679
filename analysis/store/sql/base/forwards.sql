-- One row a forward pass. Rows of the padding row 0 are no requests; num_tokens counts padding, num_padding is its share.
select
    trace, forward, event, time_ns, runner, mode, kv_watched,
    len(list_filter(req_pool_indices, lambda row: row <> 0)) as num_requests,
    len(input_ids) as num_tokens,
    len(input_ids) - least(len(input_ids), coalesce(list_sum(list_transform(
        list_zip(req_pool_indices, extend_lens),
        lambda r: case when r[1] = 0 then 0 else greatest(r[2], 0) end)), 0))::bigint as num_padding,
    len(sampled_tokens) as num_sampled
from raw_events
where kind = 'forward'
