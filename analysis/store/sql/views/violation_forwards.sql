-- One row a violation and forward: the columns of violations, of a merged row once for each forward that it stands for.
-- Those are the next forwards of its runner that hold its request on its row (of a sweep, the runner's next sweeps).
-- Where the trace is not at hand, event and time_ns are null and the forwards are spread evenly from the first to the last.
with lasting as (
    select *, endpoint = 'SWEEP' as swept from violations where num_forwards > 1
),
steps as (
    select distinct trace, runner, request_id, req_pool_idx, false as swept, event
    from forward_requests
    semi join lasting using (trace, runner, request_id, req_pool_idx)
    union all
    select trace, runner, -1, -1, true, event from events where kind = 'sweep'
),
turns as (
    select
        *, row_number() over (partition by trace, runner, request_id, req_pool_idx, swept order by event) as turn
    from steps
),
asked as (
    select lasting.*, unnest(range(turns.turn, turns.turn + lasting.num_forwards)) as turn
    from lasting
    join turns using (trace, runner, request_id, req_pool_idx, swept, event)
)
select * from violations where num_forwards <= 1
union all by name
select asked.* exclude (turn, swept) replace (
        turns.event as event, told.forward as forward, told.time_ns as time_ns,
        case when asked.swept then 'sweep' else told.mode end as mode,
        told.forward as first_forward, told.forward as last_forward, 1::bigint as num_forwards)
from asked
join turns using (trace, runner, request_id, req_pool_idx, swept, turn)
join events as told on told.trace = turns.trace and told.event = turns.event
union all by name
select * exclude (nth, swept, step) replace (
        case when nth = 0 then event end as event, case when nth = 0 then time_ns end as time_ns,
        forward + step as forward, forward + step as first_forward, forward + step as last_forward,
        1::bigint as num_forwards)
from (
    select *, coalesce(try_cast((last_forward::hugeint - forward) * nth // (num_forwards - 1) as bigint), 0) as step
    from (
        select lasting.*, unnest(range(num_forwards)) as nth
        from lasting
        anti join turns using (trace, runner, request_id, req_pool_idx, swept, event)
    )
)
