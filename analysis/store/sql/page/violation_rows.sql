-- The first violations, as found.
select forward, launch, reasons::varchar as reasons, request, expected_position, slot, position as stored_position,
    stored_token, expected_token, writer_request, writer_forward
from violation_forwards
order by event, endpoint, pool_group, half, request_id, expected_position, number
limit :limit
