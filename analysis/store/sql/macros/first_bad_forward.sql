-- first_bad_forward(): per trace the first forward in which anything was found, and what, for whom, in which slot.
create or replace macro first_bad_forward() as table
with begun as (select trace, arg_min(forward, event) as forward from damage group by trace),
ordered as (
    select damage.*, count(*) over (partition by trace) as found,
        row_number() over (
            partition by trace order by event, source desc, pool_group, request_id, position, slot, what, number) as place
    from damage
    join begun using (trace, forward)
)
select forward, mode, what, request, pool_group, slot, position, found, trace
from ordered
where place = 1
order by trace
