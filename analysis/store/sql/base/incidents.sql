-- One row an incident: violations and findings of one cause, with its kind, confidence and evidence (docs/reference/incidents.md).
select * from raw_incidents
