-- Only with the prefix cache on?
-- section: first
select name as request, prefix_hit, prompt_len, :position as position, :position between 0 and prefix_hit - 1 as in_cached_prefix
from requests
where request_id = :request_id
-- section: overall
with hit as (select distinct trace, request_id from damage where request_id >= 0)
select
    coalesce(prefix_hit, 0) > 0 as began_with_cached_prefix, count(*) as requests, count(hit.request_id) as hit,
    round(count(hit.request_id) / count(*), 3) as share
from requests
left join hit using (trace, request_id)
group by began_with_cached_prefix
order by began_with_cached_prefix
