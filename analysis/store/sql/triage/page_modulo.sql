-- Is it the prompt length modulo the page size?
-- section: first
select requests.name as request, prompt_len, page_size, prompt_len % page_size as remainder, :position as position,
    :position % page_size as position_in_page
from requests
join pool_groups using (trace)
where request_id = :request_id and pool_group = :pool_group
-- section: overall
with hit as (select distinct trace, request_id from damage where request_id >= 0),
pages as (select trace, max(page_size) as page_size from pool_groups group by trace)
select
    page_size, prompt_len % page_size as remainder, count(*) as requests, count(hit.request_id) as hit
from requests
join pages using (trace)
left join hit using (trace, request_id)
where prompt_len >= 0
group by all
order by hit desc, remainder
limit 8
