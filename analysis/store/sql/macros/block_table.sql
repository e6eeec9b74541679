-- block_table(request, forward): a request's row of the block table as that forward, or its last one before it, left it: which
-- slot stands at each position, since which forward and how (changed or written, see table_entries), and who wrote the slot last.
create or replace macro block_table(which_request, which_forward) as table
with ran as (
    select trace, request_id, request, req_pool_idx, event, prefix_len + greatest(extend_len, 0) as length
    from forward_requests
    where (request_id::varchar = which_request::varchar or request = which_request::varchar) and forward <= which_forward
    qualify row_number() over (partition by trace, request_id order by event desc) = 1
),
entries as (
    select trace, request_id, request, table_index, position, slot, how, entry.event, entry.forward, ran.event as until
    from table_entries as entry
    join ran using (trace, req_pool_idx)
    where entry.event <= ran.event and position < length
    qualify row_number() over (
        partition by trace, request_id, table_index, position order by entry.event desc, how desc) = 1
),
writers as (
    select trace, table_index, slot,
        arg_max({forward: forward, request: request, position: position, token: token}, event) as last
    from tokens
    semi join entries using (trace, table_index, slot)
    where event <= (select max(until) from entries)
    group by all
)
select table_index, position, slot, how, event, forward, last.forward as writer_forward, last.request as writer_request,
    last.position as writer_position, last.token as token, request_id, request, trace
from entries
left join writers using (trace, table_index, slot)
order by trace, request_id, table_index, position
