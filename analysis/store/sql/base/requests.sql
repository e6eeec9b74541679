-- One row a request: what was told of it, its forwards, the prefix it began with (prefix_hit), its last status.
with told as (
    select
        trace, request_id, max(event) as event, arg_max(name, event) as name, arg_max(prompt_len, event) as prompt_len,
        arg_max(room, event) as room, arg_max(labels, event) as labels, min(time_ns) as arrived_ns
    from raw_events
    where kind = 'request'
    group by all
),
ran as (
    select
        trace, request_id, min(forward) as first_forward, max(forward) as last_forward, count(*) as num_forwards,
        try_cast(sum(greatest(extend_len, 0)) as bigint) as num_tokens,
        arg_min(prefix_len, event) as prefix_hit,
        max(prefix_len + greatest(extend_len, 0)) as length
    from forward_requests
    group by all
),
last_told as (
    select
        trace, request_id, arg_max(status, event) as status,
        count(*) filter (where status = 'retracted') as num_retracted
    from statuses
    group by all
)
select
    trace, request_id,
    coalesce(nullif(told.name, ''), request_id::varchar) as request,
    coalesce(nullif(told.name, ''), request_id::varchar) as name,
    coalesce(told.prompt_len, -1) as prompt_len,
    coalesce(told.room, -1) as room,
    ran.first_forward, ran.last_forward, coalesce(ran.num_forwards, 0) as num_forwards,
    coalesce(ran.num_tokens, 0) as num_tokens, ran.prefix_hit, ran.length,
    coalesce(last_told.status, '') as status, coalesce(last_told.num_retracted, 0) as num_retracted,
    told.event, told.arrived_ns, coalesce(told.labels, '') as labels
from told
full join ran using (trace, request_id)
left join last_told using (trace, request_id)
