-- Violations and findings, by forward.
select trace, source, time_ns, count(*) as found
from damage_forwards
join (select trace, forward, min(time_ns) as time_ns from forwards group by all) as times using (trace, forward)
where time_ns > 0
group by all
order by trace, source, time_ns
