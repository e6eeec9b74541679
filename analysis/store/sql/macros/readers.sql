-- readers(slot, from_forward, to_forward, in_group := 0): which forwards read a slot as part of a request's prefix, at which
-- position, and since which forward the block table led there. Of a sliding window what lies inside it.
create or replace macro readers(which_slot, from_forward, to_forward, in_group := 0) as table
with of_group as (
    select trace, runner, table_index, lut, window_tokens from pool_groups where pool_group = in_group
),
-- the block table's slots that led to it, from one event up to another
mapped as (
    select trace, which_slot as slot, 0 as from_event, null as to_event from of_group where lut < 0
    union all
    select trace, slot, from_event, to_event
    from (
        select trace, full_slot as slot, swa_slot, event as from_event,
            lead(event) over (partition by trace, full_slot order by event) as to_event
        from lut_changes
        join of_group using (trace, lut)
    )
    where swa_slot = which_slot
),
places as (
    select distinct trace, table_index, req_pool_idx, position
    from table_entries
    semi join mapped using (trace, slot)
    semi join of_group using (trace, table_index)
),
-- a forward reads what it changed itself, and not yet what it writes: in halves of an event
entries as (
    select *, 2 * event + (how = 'written')::int as half, lead(half) over (
        partition by trace, table_index, req_pool_idx, position order by half) as next_half
    from table_entries
    semi join places using (trace, table_index, req_pool_idx, position)
)
select batch.event, batch.forward, batch.mode, batch.request_id, batch.request, req_pool_idx, entries.position,
    entries.forward as since_forward, entries.how, trace
from forward_requests as batch
join of_group using (trace, runner)
join entries using (trace, table_index, req_pool_idx)
join mapped using (trace, slot)
where batch.forward between from_forward and to_forward
    and position < prefix_len and (window_tokens = 0 or position >= prefix_len - window_tokens)
    and half <= 2 * batch.event and coalesce(next_half > 2 * batch.event, true)
    and mapped.from_event <= batch.event and coalesce(mapped.to_event > batch.event, true)
order by trace, batch.event, req_pool_idx, position
