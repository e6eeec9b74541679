-- Who held the slots, from which forward to which; open where the trace ends first.
select pool_group, slot, holder, lives.request_id, lives.request, began, ended, from_forward, to_forward,
    given.name as given_by
from (
    :lives
) as lives
left join requests as given on given.trace = lives.trace and given.request_id = lives.given_by
where from_forward is not null and (to_forward is null or to_forward >= from_forward)
qualify row_number() over (
    partition by pool_group, slot order by abs(coalesce(to_forward, from_forward) - :forward), from_forward, from_event, holder,
        lives.request_id) <= :each
order by abs(from_forward - :forward), pool_group, slot, from_forward, from_event, holder, lives.request_id
limit :limit
