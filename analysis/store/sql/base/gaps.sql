-- One row a part of a trace that is missing or damaged; missing_events is null where nobody knows how many.
select * from _gaps
