-- Violations with the incident that each belongs to.
select incident_members.incident, violations.*
from violations
join incident_members
    on incident_members.trace = violations.trace and incident_members.number = violations.number
where incident_members.source = 'violation'
