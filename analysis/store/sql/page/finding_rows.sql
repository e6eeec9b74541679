-- The first findings, as found.
select forward, kind, request, position, slot, count, detail, evidence as evidence_events
from findings
order by event
limit :limit
