-- Incidents, each at its first sign.
select trace, incident, kind, title, confidence, score, first_forward, last_forward, time_ns, num_requests, num_slots, sentence
from incidents
where time_ns > 0
order by trace, incident
