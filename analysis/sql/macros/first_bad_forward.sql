-- first_bad_forward(): per trace the first forward in which anything was found, and what, for whom, in which slot.
create or replace macro first_bad_forward() as table
select trace, forward, arg_min(mode, event) as mode, arg_min(what, (event, source = 'finding')) as what,
    arg_min(request, event) as request, arg_min(slot, event) as slot, arg_min(position, event) as position,
    count(*) as found
from damage
group by trace, forward
qualify row_number() over (partition by trace order by min(event)) = 1
order by trace
