-- One row a request status told: admitted with a row, retracted, finished, aborted.
select trace, event, time_ns, request_id, status, req_pool_indices[1] as req_pool_idx, note
from raw_events
where kind = 'status'
