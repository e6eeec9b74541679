-- One row a block-table entry that the recorder saw changed: in a healthy engine prefix hits, forks and moved pages. What
-- a forward writes itself is in tokens. request_id: whose row it is in this event's forward, null where none is.
with told as (
    select
        trace, event, kind, forward,
        list_transform(list_zip(table_index, table_row, table_start, table_count), lambda r: {
            i: r[1], row: r[2], start: greatest(least(r[3], 1::bigint << 61), -1), n: greatest(0, least(r[4], len(table_slots)))
        }) as runs,
        table_slots
    from raw_events
    where len(table_slots) > 0
),
spread as (
    select
        trace, event, kind, forward,
        unnest(flatten(list_transform(runs, lambda r: list_resize([]::bigint[], r.n, r.i)))) as table_index,
        unnest(flatten(list_transform(runs, lambda r: list_resize([]::bigint[], r.n, r.row)))) as req_pool_idx,
        unnest(flatten(list_transform(runs, lambda r: range(r.start, r.start + r.n)))) as position,
        unnest(table_slots) as slot
    from told
),
readers as (
    select trace, event, req_pool_idx, min(request_id) as request_id, arg_min(request, request_id) as request from forward_requests group by all
)
select spread.*, readers.request_id, readers.request
from spread
left join readers using (trace, event, req_pool_idx)
