-- Which requests an incident hit.
select trace, incident, request_id
from incident_requests
