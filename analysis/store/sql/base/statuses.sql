-- One row a request status told: admitted with a row, retracted, finished, aborted.
select trace, event, time_ns, request_id, request_name(_request_names.name, request_id) as request, status,
    req_pool_indices[1] as req_pool_idx, note
from raw_events
left join _request_names using (trace, request_id)
where kind = 'status'
