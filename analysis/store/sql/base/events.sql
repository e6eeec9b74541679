-- One row an event, its scalar columns only. last_forward and next_forward: the forwards that stand before and after it.
select
    raw_events.trace, event, kind, time_ns, forward, runner, mode, kv_watched, raw_events.request_id, request_name(_request_names.name, raw_events.request_id) as request,
    raw_events.name, prompt_len, room, peer, status,
    num_bytes, lost_events, note, labels,
    coalesce(max(case when kind = 'forward' then forward end)
        over (partition by raw_events.trace order by event rows between unbounded preceding and 1 preceding), -1) as last_forward,
    min(case when kind = 'forward' then forward end)
        over (partition by raw_events.trace order by event rows between 1 following and unbounded following) as next_forward
from raw_events
left join _request_names using (trace, request_id)
