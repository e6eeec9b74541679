-- Findings with the incident that each belongs to.
select incident_members.incident, findings.*
from findings
join incident_members on incident_members.trace = findings.trace and incident_members.number = findings.number
where incident_members.source = 'finding'
