-- What the engine did meanwhile: forwards, requests and tokens by mode in every :width forwards.
select forward // :width * :width as forward, mode, count(*) as forwards, max(num_requests) as requests,
    sum(num_tokens - num_padding)::bigint as tokens
from forwards
group by 1, 2
order by 1, 2
