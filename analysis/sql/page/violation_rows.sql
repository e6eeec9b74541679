-- The first violations, as found.
select forward, launch, reasons::varchar as reasons, request, expected_position, slot, position as stored_position,
    stored_token, expected_token, writer_request, writer_forward
from violations
order by event
limit :limit
