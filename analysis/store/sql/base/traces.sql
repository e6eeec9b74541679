-- One row a trace: the header's facts, and whether the file has its end.
select * from _traces
