-- What was told of the requests between forwards: arrivals, statuses, slots given and given back, transfers.
select life.request_id, life.event, coalesce(events.next_forward, events.last_forward) as forward, what, detail
from (
    select trace, request_id, event, 'arrived' as what, concat('prompt of ', prompt_len) as detail
    from requests
    where event is not null
    union all
    select trace, request_id, event, status, concat_ws(', ', 'row ' || req_pool_idx, nullif(note, '')) from statuses
    union all
    select trace, request_id, event, concat_ws(' ', kind, nullif(status, '')),
        concat_ws(', ', sum(slot_count) || ' slots from ' || min(slot_start), nullif(note, ''))
    from slot_events
    group by trace, request_id, event, kind, status, note
    union all
    select trace, request_id, event, concat(direction, ' ', status), concat(num_slots, ' slots, room ', room) from transfers
) as life
left join events using (trace, event)
where life.request_id in (:requests)
qualify row_number() over (partition by life.request_id order by life.event) <= :each
order by life.event, life.request_id
limit :limit
