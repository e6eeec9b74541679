-- One row a violation and forward, or finding: damage by forward. Counts over many forwards are cheaper on damage, with
-- sum(num_forwards).
select
    trace, 'violation' as source, reasons::varchar as what, event, forward, mode, runner, pool_group, request_id, request,
    req_pool_idx, expected_position as position, slot, stored_token, expected_token, writer_event, writer_forward,
    writer_request_id, writer_request, number, last_forward, num_forwards
from violation_forwards
union all by name
select * from damage where source = 'finding'
