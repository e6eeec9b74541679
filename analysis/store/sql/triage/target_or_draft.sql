-- Target or draft?
-- section: first
select :runner as runner, runner_name, name as pool_group, kind, ':mode' as mode
from pool_groups
where pool_group = :pool_group
-- section: overall
select coalesce(runners.runner_name, '') as runner_name, damage.mode, count(distinct request_id) as requests,
    min(forward) as first_forward, count(*) as found
from damage_forwards as damage
left join (select distinct trace, runner, runner_name from pool_groups) as runners using (trace, runner)
group by all
order by first_forward, found desc
