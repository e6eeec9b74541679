-- What differs only in when and with whom things were computed.

-- section: plans
create table {s}_plans as
select pair, min(event) as first, arg_min(forward, event) as first_forward, arg_min(prefix, event) as hit,
    count(*) as forwards,
    list(extend order by event) filter (where mode in ('extend', 'mixed') and prefix < prompt_len) as chunks
from {s}_batches as t join pairs on pairs.{s}_id = t.request_id where runner = 0 group by pair

-- section: retractions
create table {s}_retractions as
select pair, count(*) as times from {s}_statuses join pairs on pairs.{s}_id = request_id
where status = 'retracted' group by pair

-- section: both
create table plans as
select pair, a.first as a_first, b.first as b_first, a.first_forward as a_forward, b.first_forward as b_forward,
    a.hit as a_hit, b.hit as b_hit, a.forwards as a_forwards, b.forwards as b_forwards,
    coalesce(a.chunks, []) as a_chunks, coalesce(b.chunks, []) as b_chunks,
    coalesce(ra.times, 0) as a_retracted, coalesce(rb.times, 0) as b_retracted,
    row_number() over (order by a.first, pair) as a_rank, row_number() over (order by b.first, pair) as b_rank
from a_plans as a join b_plans as b using (pair)
left join a_retractions as ra using (pair) left join b_retractions as rb using (pair)

-- section: hits
insert into firsts
select pair, 'hit', 0, -1, least(a_hit, b_hit), b_first, a_first, a_forward, b_first, b_forward,
    a_hit || ' tokens', b_hit || ' tokens'
from plans where a_hit <> b_hit

-- section: schedules
insert into firsts
select pair, 'schedule', 0, -1, -1, b_first, a_first, a_forward, b_first, b_forward,
    concat_ws(', ', 'chunks ' || array_to_string(a_chunks, '+'), a_forwards || ' forwards',
        if(a_retracted > 0, 'retracted ' || a_retracted || ' times', null), if(a_rank <> b_rank, a_rank || '. in line', null)),
    concat_ws(', ', 'chunks ' || array_to_string(b_chunks, '+'), b_forwards || ' forwards',
        if(b_retracted > 0, 'retracted ' || b_retracted || ' times', null), if(a_rank <> b_rank, b_rank || '. in line', null))
from plans where a_chunks <> b_chunks or a_forwards <> b_forwards or a_retracted <> b_retracted or a_rank <> b_rank

-- section: totals
select count(*) filter (where a_hit <> b_hit) as other_hits,
    count(*) filter (where a_chunks <> b_chunks) as other_chunks,
    count(*) filter (where a_forwards <> b_forwards) as other_forward_counts,
    count(*) filter (where a_rank <> b_rank) as other_order,
    coalesce(sum(a_hit), 0)::bigint as a_cached, coalesce(sum(b_hit), 0)::bigint as b_cached,
    coalesce(sum(a_retracted), 0)::bigint as a_retractions, coalesce(sum(b_retracted), 0)::bigint as b_retractions
from plans
