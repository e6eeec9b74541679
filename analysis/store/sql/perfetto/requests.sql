-- Requests that were in a forward: from their arrival, if it is known, to their last forward.
select requests.trace, request_id, name, prompt_len, prefix_hit, num_tokens, num_forwards, num_retracted, requests.status,
    first_forward, last_forward, least(nullif(arrived_ns, 0), first.time_ns) as from_ns, last.time_ns as to_ns
from requests
join (select trace, forward, min(time_ns) as time_ns from forwards group by all) as first
    on first.trace = requests.trace and first.forward = first_forward
join (select trace, forward, max(time_ns) as time_ns from forwards group by all) as last
    on last.trace = requests.trace and last.forward = last_forward
where first.time_ns > 0
order by requests.trace, from_ns, request_id
