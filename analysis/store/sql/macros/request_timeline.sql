-- request_timeline(request): a request's life by its id or its name: told events, forwards, and what was found in each.
create or replace macro request_timeline(which_request) as table
with chosen as (
    select trace, request_id, request from requests
    where request_id::varchar = which_request::varchar or name = which_request::varchar
),
bad as (
    select trace, forward, request_id, count(*) as found, string_agg(distinct what, ', ' order by what) as kinds
    from damage_forwards as damage
    semi join chosen using (trace, request_id)
    group by all
)
select life.request_id, chosen.request, life.event, life.forward, what, detail, life.trace
from (
    select trace, request_id, event, null::bigint as forward, 'arrived' as what, concat('prompt of ', prompt_len) as detail
    from requests
    where event is not null
    union all
    select trace, request_id, event, null, status, concat_ws(', ', 'row ' || req_pool_idx, nullif(note, ''))
    from statuses
    union all
    select batch.trace, batch.request_id, batch.event, batch.forward, batch.mode,
        concat_ws(', ', 'row ' || req_pool_idx, 'positions ' || prefix_len || ' to ' || (prefix_len + extend_len - 1),
            'found ' || bad.found || ' (' || bad.kinds || ')')
    from forward_requests as batch
    left join bad using (trace, forward, request_id)
    union all
    select trace, request_id, event, null, concat_ws(' ', kind, nullif(status, '')),
        concat_ws(', ', sum(slot_count) || ' slots from ' || min(slot_start), nullif(note, ''))
    from slot_events
    group by trace, request_id, event, kind, status, note
    union all
    select trace, request_id, event, forward, concat(direction, ' ', status), concat(num_slots, ' slots, room ', room)
    from transfers
) as life
join chosen using (trace, request_id)
order by life.trace, life.event
