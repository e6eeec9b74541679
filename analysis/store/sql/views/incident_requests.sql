-- One row an incident and request that it hit: since when, until when, and how often. At most a thousand requests an
-- incident; incidents.num_requests counts them all.
with hit as (
    select trace, incident, unnest(request_ids) as request_id, unnest(requests) as request from incidents
),
found as (
    select incident_members.trace, incident_members.incident, damage.request_id, min(damage.forward) as first_forward,
        max(damage.last_forward) as last_forward,
        coalesce(sum(damage.num_forwards) filter (where damage.source = 'violation'), 0)::bigint as violations,
        count(*) filter (where damage.source = 'finding') as findings,
        count(distinct damage.pool_group * (1::bigint << 40) + damage.slot) as slots
    from damage
    join incident_members using (trace, source, number)
    group by all
)
select hit.trace, hit.incident, hit.request_id, hit.request, found.first_forward, found.last_forward, found.violations,
    found.findings, found.slots
from hit
left join found using (trace, incident, request_id)
