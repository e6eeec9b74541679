-- Forwards in the order of their times.
select trace, forward, time_ns, runner, mode, num_requests, num_tokens, num_padding, num_sampled
from forwards
where time_ns > 0
order by trace, runner, time_ns, forward
