-- slot_owner(slot, forward, in_group := 0): who held a slot while a forward ran; several rows where it was shared. Began write: no slot history is told, and this is who had written it last.
create or replace macro slot_owner(which_slot, which_forward, in_group := 0) as table
select lives.holder, nullif(lives.request_id, -1) as request_id, lives.request, lives.began,
    lives.from_forward, lives.to_forward, lives.ended, lives.trace
from lifetimes_between(which_slot, which_slot) as lives
where lives.pool_group = in_group and lives.from_forward <= which_forward
    and (lives.to_forward is null or lives.to_forward >= which_forward)
order by lives.trace, lives.from_event
