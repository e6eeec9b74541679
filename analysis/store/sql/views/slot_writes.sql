-- One row a token written and pool group, in that group's own slot numbering, behind a full-to-SWA table too.
select tokens.trace, pool_groups.pool_group, tokens.slot, tokens.event, tokens.forward, tokens.request_id, tokens.request,
    tokens.position, tokens.token
from tokens
join pool_groups using (trace, runner, table_index)
where pool_groups.lut < 0
union all
select trace, pool_group, slot, event, forward, request_id, request, position, token from swa_tokens
