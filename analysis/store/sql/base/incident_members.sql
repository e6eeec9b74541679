-- One row a violation or finding: which incident it belongs to; source and number are those of damage.
select * from raw_incident_members
