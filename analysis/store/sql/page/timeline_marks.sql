-- Notes in the trace, such as an injected fault, and the forward that follows each.
select marks.event, case when marks.forward >= 0 then marks.forward else coalesce(events.next_forward, events.last_forward) end as forward,
    marks.note, marks.labels
from marks
left join events using (trace, event)
order by marks.event
limit :limit
