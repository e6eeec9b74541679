-- One row a slot that attention got and that is another than the block table's, or than the one that the forward writes
-- there: whose position it is, and the slot that came, in the pool group's own numbering.
with told as (
    select
        trace, event, forward, runner, req_pool_indices, request_ids,
        list_transform(
            list_zip(attention_group, attention_request, attention_start, attention_count),
            lambda r: {
                g: r[1], request: r[2], start: greatest(least(r[3], 1::bigint << 61), -1),
                n: greatest(0, least(r[4], len(attention_slots)))
            }
        ) as runs,
        attention_slots
    from raw_events
    where kind = 'forward' and len(attention_slots) > 0
),
spread as (
    select
        trace, event, forward, runner, req_pool_indices, request_ids,
        unnest(flatten(list_transform(runs, lambda r: list_resize([]::bigint[], r.n, r.g)))) as pool_group,
        unnest(flatten(list_transform(runs, lambda r: list_resize([]::bigint[], r.n, r.request)))) as batch_index,
        unnest(flatten(list_transform(runs, lambda r: range(r.start, r.start + r.n)))) as position,
        unnest(attention_slots) as slot
    from told
)
select
    spread.trace, event, forward, runner, pool_group, batch_index,
    req_pool_indices[batch_index + 1] as req_pool_idx,
    request_ids[batch_index + 1] as request_id, request_name(told_names.name, request_ids[batch_index + 1]) as request,
    position, slot
from spread
left join _request_names as told_names
    on told_names.trace = spread.trace and told_names.request_id = request_ids[batch_index + 1]
