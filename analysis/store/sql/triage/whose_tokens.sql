-- Other requests' tokens, or the own prompt truncated?
-- section: first
select writes.forward, requests.name as request, writes.table_position, writes.position, writes.token
from tokens as writes
left join requests using (trace, request_id)
where writes.request_id = :request_id and writes.table_position between :position - 2 and :position + 2
    and writes.event <= :event
order by writes.event desc, writes.table_position
limit 8
-- section: overall
with wrong as (  -- the first thousand are enough to tell the pattern
    select trace, min(forward) as forward, request_id, position, stored_token, expected_token, writer_request_id,
        writer_forward
    from damage
    where source = 'violation' and expected_token >= 0 and stored_token >= 0 and stored_token <> expected_token
        and request_id >= 0
    group by all
    order by forward, request_id, position, stored_token, expected_token, writer_forward, writer_request_id
    limit 1000
),
sampled_for_others as (
    select distinct wrong.trace, wrong.request_id, wrong.position, wrong.stored_token
    from wrong
    join samples
        on samples.trace = wrong.trace and samples.token = wrong.stored_token
        and samples.request_id <> wrong.request_id
        and samples.forward between wrong.writer_forward - 64 and wrong.writer_forward
),
own as (
    select wrong.trace, wrong.request_id, wrong.position, wrong.stored_token,
        arg_min(
            tokens.table_position - wrong.position,
            (abs(tokens.table_position - wrong.position), tokens.table_position)) as shift
    from wrong
    join tokens
        on tokens.trace = wrong.trace and tokens.request_id = wrong.request_id
        and tokens.token = wrong.stored_token and tokens.table_position <> wrong.position
        and tokens.forward <= wrong.forward
    group by all
)
select
    case
        when writer_request_id <> request_id and writer_request_id >= 0 then 'written by another request'
        when own.shift is not null and abs(own.shift) <= 8 then concat('its own, of ', abs(own.shift), ' position(s) ',
            case when own.shift > 0 then 'later' else 'earlier' end)
        when others.stored_token is not null then 'sampled for another request'
        when own.shift is not null then 'its own, from further away'
        else 'unknown'
    end as stored_tokens_are,
    count(*) as tokens, count(distinct wrong.request_id) as requests
from wrong
left join own using (trace, request_id, position, stored_token)
left join sampled_for_others as others using (trace, request_id, position, stored_token)
group by stored_tokens_are
order by tokens desc, stored_tokens_are
limit 8
