-- One row a transfer event: start, end or failure of one pool group's part of a request's KV, sent or received.
select
    trace, event, time_ns, forward, mode as direction, status, room, request_id, request_name(_request_names.name, request_id) as request,
    req_pool_indices[1] as req_pool_idx,
    slot_group[1] as pool_group, prefix_lens[1] as start_position, try_cast(list_sum(slot_count) as bigint) as num_slots,
    peer, num_bytes, note
from raw_events
left join _request_names using (trace, request_id)
where kind = 'transfer'
