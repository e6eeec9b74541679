-- blast_radius(incident := 0, from_forward := 0): how far damage spread, request by request, in the order in which it
-- reached them; of one incident, or of everything.
create or replace macro blast_radius(incident := 0, from_forward := 0) as table
with chosen as (  -- one of the halves is empty, and costs nothing
    select trace, request_id, request, pool_group, slot, what, forward
    from damage_forwards as damage
    where incident = 0 and forward >= from_forward
    union all
    select damage.trace, request_id, request, pool_group, slot, what, forward
    from damage_forwards as damage
    semi join (
        select members.trace, members.source, members.number
        from incident_members as members
        where members.incident = incident
    ) using (trace, source, number)
    where incident <> 0 and forward >= from_forward
),
by_slot as (  -- few rows, however often the same slots were found
    select trace, request_id, pool_group, slot, what, any_value(request) as request, min(forward) as first_forward,
        max(forward) as last_forward, count(*) as found
    from chosen
    group by trace, request_id, pool_group, slot, what
),
by_forward as (
    select trace, request_id, count(*) as forwards
    from (select distinct trace, request_id, forward from chosen)
    group by trace, request_id
)
select nullif(request_id, -1) as request_id, any_value(request) as request, min(first_forward) as first_forward,
    max(last_forward) as last_forward, any_value(forwards) as forwards,
    count(distinct pool_group * (1::bigint << 40) + slot) as slots, sum(found)::bigint as found,
    string_agg(distinct what, ', ' order by what) as kinds, trace
from by_slot
join by_forward using (trace, request_id)
group by trace, by_slot.request_id
order by trace, first_forward, found desc, by_slot.request_id
