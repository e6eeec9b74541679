-- One row a slot that the prefix cache held when it was walked.
select
    trace, event, forward,
    unnest(sweep_group) as pool_group, unnest(sweep_slot) as slot, unnest(sweep_position) as position,
    unnest(sweep_prev) as prev_slot, unnest(sweep_locked) as locked
from raw_events
where kind = 'sweep'
