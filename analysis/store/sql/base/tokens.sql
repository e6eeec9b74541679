-- One row a token written: slot (numbering of its block table), position as the model was fed it, table_position where
-- the block table has it. Padding is nobody's token and left out. A pool group behind a full-to-SWA table numbers its
-- slots anew: see slot_writes.
with batch as (
    select
        trace, event, forward, runner, mode, input_ids, positions, out_cache_loc, len(input_ids) as num_tokens,
        -- a length or prefix that contradicts the batch must not make a list of any size, or overflow
        list_transform(
            list_zip(req_pool_indices, request_ids, prefix_lens, extend_lens),
            lambda r: {
                row: r[1], id: r[2], prefix: r[3],
                n: case when r[1] = 0 or r[3] not between -(1::bigint << 61) and 1::bigint << 61 then 0
                    else greatest(0, least(r[4], len(input_ids))) end
            }
        ) as requests
    from raw_events
    where kind = 'forward' and len(input_ids) > 0
),
spread as (
    select
        trace, event, forward, runner, mode, table_index,
        unnest(flatten(list_transform(requests, lambda r: list_resize([]::bigint[], r.n, r.id)))) as request_id,
        unnest(flatten(list_transform(requests, lambda r: list_resize([]::bigint[], r.n, r.row)))) as req_pool_idx,
        unnest(flatten(list_transform(requests, lambda r: range(r.prefix, r.prefix + r.n)))) as table_position,
        unnest(positions) as position,
        unnest(input_ids) as token,
        unnest(out_cache_loc[table_index * num_tokens + 1 : (table_index + 1) * num_tokens]) as slot
    from batch
    join _tables using (trace)
)
select trace, event, forward, runner, mode, table_index, request_id, request_name(name, request_id) as request, req_pool_idx,
    table_position, position, token, slot
from spread
left join _request_names using (trace, request_id)
where request_id is not null and slot is not null
