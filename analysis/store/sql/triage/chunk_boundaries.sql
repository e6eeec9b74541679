-- Only at chunk boundaries?
-- section: first
select number as chunk, forward, first_position, end_position, :position as position,
    case :position when end_position - 1 then 'last of its chunk' when first_position then 'first of its chunk'
        else 'inside' end as place
from chunks
where request_id = :request_id and :position between first_position and end_position - 1
order by event
limit 6
-- section: overall
with begun as (  -- a request's first damage; what follows it in the chain follows from it
    select trace, request_id, arg_min(position, (event, position)) as position
    from damage
    where request_id >= 0 and position >= 0
    group by all
),
bounds as (
    select
        trace, request_id, list(first_position) filter (where first_position > 0) as starts,
        list(end_position - 1) as ends, max(end_position) as chunked
    from chunks
    group by all
),
placed as (
    select
        begun.request_id,
        case when list_contains(ends, position) then 'last of a chunk'
            when list_contains(starts, position) then 'first of a chunk'
            when position < chunked then 'inside a prompt' else 'in the answer' end as place
    from begun
    left join bounds using (trace, request_id)
)
select place as first_damaged_position, count(*) as requests from placed group by place order by requests desc, place
