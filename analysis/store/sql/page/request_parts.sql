-- Requests, forward by forward: chunks of a prompt one by one, decodes that follow on one another as one part.
with steps as (
    select request_id, forward, event, runner, mode, prefix_len, extend_len, req_pool_idx,
        case when extend_len = 1 then 'decode' else mode end as part
    from forward_requests
    where request_id in (:requests)
),
begun as (
    select *, not coalesce(
        part = 'decode' and lag(part) over life = 'decode' and prefix_len = lag(prefix_len) over life + 1
        and req_pool_idx = lag(req_pool_idx) over life, false) as begins
    from steps
    window life as (partition by request_id, runner order by event)
),
parts as (
    select *, sum(begins::int) over (partition by request_id, runner order by event) as number from begun
)
select request_id, runner, part, min(forward) as from_forward, max(forward) as to_forward,
    min(prefix_len) as first_position, max(prefix_len + greatest(extend_len, 0)) as end_position,
    any_value(req_pool_idx) as row, count(*) as forwards
from parts
group by request_id, runner, part, number
order by from_forward, request_id, runner
limit :limit
