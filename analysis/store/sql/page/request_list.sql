-- Requests: those that damage names first, then those that wrote what was damaged, then the others.
with hit as (
    select trace, request_id, min(forward) as first_bad_forward, sum(num_forwards)::bigint as found
    from damage
    where request_id >= 0
    group by all
),
writers as (
    select trace, writer_request_id as request_id, sum(num_forwards)::bigint as written
    from damage
    where writer_request_id >= 0 and writer_request_id <> request_id
    group by all
)
select requests.request_id, name, prompt_len, prefix_hit, first_forward, last_forward, num_forwards, num_tokens, status,
    coalesce(found, 0) as found, first_bad_forward, coalesce(written, 0) as wrote_damaged
from requests
left join hit using (trace, request_id)
left join writers using (trace, request_id)
order by hit.request_id is null, first_bad_forward, found desc, written is null, written desc, first_forward, request_id
limit :limit
