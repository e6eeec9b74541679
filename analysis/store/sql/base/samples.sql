-- One row a sampled token, told by its own forward or later (event tells which); number counts a request's tokens of
-- that forward from 0.
with told as (
    select
        trace, event, forward,
        list_transform(list_zip(range(len(sampled_lens)), sampled_lens), lambda r: {
            i: r[1], n: greatest(0, least(r[2], len(sampled_tokens)))
        }) as requests,
        sampled_tokens
    from raw_events
    where kind in ('forward', 'sample') and len(sampled_tokens) > 0
),
spread as (
    select
        trace, event, forward,
        unnest(flatten(list_transform(requests, lambda r: list_resize([]::bigint[], r.n, r.i)))) as batch_index,
        unnest(flatten(list_transform(requests, lambda r: range(r.n)))) as number,
        unnest(sampled_tokens) as token
    from told
)
select spread.trace, spread.event, spread.forward, batch.request_id, batch.request, spread.number, spread.token
from spread
left join forward_requests as batch using (trace, forward, batch_index)
where spread.batch_index is not null
