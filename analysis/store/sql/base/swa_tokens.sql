-- One row a token written to a pool group behind a full-to-SWA table: slot is that group's own, full_slot the block
-- table's. A token whose entry is 0 has no slot there and is left out.
select
    tokens.trace, pool_groups.pool_group, lut_changes.swa_slot as slot, tokens.slot as full_slot, tokens.event,
    tokens.forward, tokens.request_id, tokens.request, tokens.position, tokens.token
from tokens
join pool_groups using (trace, runner, table_index)
asof join lut_changes
    on lut_changes.trace = tokens.trace and lut_changes.lut = pool_groups.lut
    and lut_changes.full_slot = tokens.slot and lut_changes.event <= tokens.event
where pool_groups.lut >= 0 and lut_changes.swa_slot > 0
