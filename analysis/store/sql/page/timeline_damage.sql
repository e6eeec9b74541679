-- Violations and findings over time: how many of each class in every :width forwards.
select forward // :width * :width as forward, :class as class, count(*) as found
from damage_forwards
where forward >= 0
group by 1, 2
order by 1, 2
