-- Where the trace knows nothing: dropped events, damaged and torn parts, and the forward before each.
select *
from (
    select 'loss' as kind, losses.event, events.last_forward as forward, losses.lost_events as events, losses.note as reason
    from losses
    left join events using (trace, event)
    union all
    select gaps.kind, after_event, greatest(events.last_forward, case when events.kind = 'forward' then events.forward end),
        missing_events, gaps.reason
    from gaps
    left join events on events.trace = gaps.trace and events.event = gaps.after_event
)
order by event
limit :limit
