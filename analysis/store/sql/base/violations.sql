-- One row a violation, as in violations.parquet (docs/reference/replay.md); its column "group" is pool_group here, and number is the
-- row's number in the file. A row of an interval replay stands for num_forwards forwards, of which event, forward, time_ns
-- and mode are the first: count with sum(num_forwards), and see violation_forwards for a row each.
select * replace (
    coalesce(first_forward, forward) as first_forward, coalesce(last_forward, forward) as last_forward,
    least(greatest(coalesce(num_forwards, 1), 1), 1::bigint << 40) as num_forwards)
from raw_violations
