-- A request's chain as forward :forward read it, positions :first to :last: which slot each position led to, what stands
-- there against what was expected (-1: not compared), whose KV bytes changed and when, and who wrote it. Hashes are those
-- of the position before.
with bad as (
    select expected_position as table_position, arg_min(slot, launch_tag) as slot,
        arg_min(position, launch_tag) as stored_position,
        arg_min(stored_token, launch_tag) as stored_token, max(expected_token) as expected_token,
        arg_min(stored_chain_hash, launch_tag) as stored_chain, arg_min(expected_aux, launch_tag) as expected_chain,
        bit_or(fail_reason_bits) as bits, string_agg(distinct launch, ', ' order by launch) as launches,
        string_agg(distinct half, ' and ' order by half) filter (where fail_reason_bits & 4 > 0) as changed_halves,
        arg_min(writer_forward, launch_tag) as writer_forward, arg_min(writer_request, launch_tag) as writer_request,
        count(*) as found
    from violation_forwards
    where event = :event and request_id = :request_id and pool_group = :pool_group
        and expected_position between :first and :last
    group by expected_position
),
entries as (  -- which slot of the block table each position led to, and the token that the request itself put there
    select table_position, event, slot, token from tokens
    where request_id = :request_id and runner = :runner and table_index = :table_index and event <= :event
        and table_position between :first and :last
    union all
    select position, event, slot, null from table_changes
    where request_id = :request_id and table_index = :table_index and event <= :event and position between :first and :last
),
latest as (
    select table_position, arg_max(slot, event) as slot, arg_max(token, event) as own_token, :event::bigint as at_event
    from entries
    group by all
),
led as (
    select table_position, :slot as slot, own_token
    from latest
    :lut
),
changed as (  -- the last time that a slot's bytes changed although nobody wrote them
    select slot, max(forward) as changed_forward
    from kv_changes
    where pool_group = :pool_group and event <= :event and slot in (select slot from bad)
    group by slot
),
began as (
    select min(prefix_len) as prefix_len from forward_requests where event = :event and request_id = :request_id
),
written as (
    select slot, arg_max({forward: forward, request_id: request_id, position: position, token: token}, event) as last
    from slot_writes
    where pool_group = :pool_group and event < :event and slot in (select slot from led)
    group by slot
)
select coalesce(led.table_position, bad.table_position) as position, coalesce(bad.slot, led.slot) as slot,
    coalesce(bad.stored_token, last.token) as stored_token,
    case when bad.expected_token >= 0 then bad.expected_token else coalesce(own_token, last.token) end as expected_token,
    coalesce(bad.stored_position, last.position) as stored_position,
    lower(lpad(hex(bad.stored_chain), 16, '0')) as stored_chain, lower(lpad(hex(bad.expected_chain), 16, '0')) as expected_chain,
    coalesce(bad.bits, 0) as fail_reason_bits, bad.launches, changed_halves, changed_forward, coalesce(bad.found, 0) as found,
    coalesce(bad.writer_forward, last.forward) as writer_forward,
    coalesce(bad.writer_request, requests.name) as writer_request
from led
full join bad using (table_position)
left join written on written.slot = led.slot
left join requests on requests.request_id = last.request_id
left join changed on changed.slot = bad.slot
left join began on true
-- what the forward read: before its own tokens, and inside the window; what it wrote only where that was wrong
where bad.found > 0 or (led.table_position < prefix_len and led.table_position >= :reach)
order by position
