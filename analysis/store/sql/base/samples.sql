-- One row a sampled token, told by its own forward or later (event tells which); number counts a request's tokens of
-- that forward from 0. logprob is what the engine said of it, null for nothing, logprob_kind of what it is: raw or processed.
with told as (
    select
        trace, event, forward,
        list_transform(list_zip(range(len(sampled_lens)), sampled_lens), lambda r: {
            i: r[1], n: greatest(0, least(r[2], len(sampled_tokens)))
        }) as requests,
        sampled_tokens,
        case when len(sampled_logprobs) = len(sampled_tokens) then sampled_logprobs else [] end as logprobs
    from raw_events
    where kind in ('forward', 'sample') and len(sampled_tokens) > 0
),
spread as (
    select
        trace, event, forward,
        unnest(flatten(list_transform(requests, lambda r: list_resize([]::bigint[], r.n, r.i)))) as batch_index,
        unnest(flatten(list_transform(requests, lambda r: range(r.n)))) as number,
        unnest(sampled_tokens) as token,
        unnest(list_resize(logprobs, len(sampled_tokens))) as bits
    from told
),
split as (  -- a float32
    select *, (bits >> 23) & 255 as exponent, bits & 8388607 as mantissa, 1 - 2 * ((bits >> 31) & 1) as sign
    from spread
)
select split.trace, split.event, split.forward, batch.request_id, batch.request, split.number, split.token,
    case
        when exponent = 255 then if(mantissa = 0, sign * 'infinity'::double, null)
        when exponent = 0 then sign * mantissa * pow(2.0, -149)
        else sign * (1 + mantissa / 8388608.0::double) * pow(2.0, exponent - 127)
    end as logprob,
    case when logprob is not null then ['', 'raw', 'processed'][(bits >> 32) + 1] end as logprob_kind
from split
left join forward_requests as batch using (trace, forward, batch_index)
where split.batch_index is not null
