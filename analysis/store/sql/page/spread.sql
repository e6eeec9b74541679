-- How far the damage spread, request by request.
select request, request_id, first_forward, last_forward, forwards, slots, found, kinds
from blast_radius()
limit :limit
