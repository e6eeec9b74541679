-- Violations and findings under the same columns: what is wrong, where, for whom, and who wrote the slot last. A finding
-- that names a slot and no pool group means the slot of the runner's block table, that is its first full group's.
-- number is the row's number in violations or findings. A violation stands for num_forwards forwards, from forward to
-- last_forward; damage_forwards has a row each.
select
    trace, 'violation' as source, reasons::varchar as what, event, forward, mode, runner, pool_group, request_id, request,
    req_pool_idx, expected_position as position, slot, stored_token, expected_token, writer_event, writer_forward,
    writer_request_id, writer_request, number, last_forward, num_forwards
from violations
union all
select
    findings.trace, 'finding', findings.kind, findings.event, findings.forward, coalesce(events.mode, ''), findings.runner,
    case when findings.pool_group < 0 and findings.slot >= 0 then coalesce(of_table.pool_group, -1)
        else findings.pool_group end,
    findings.request_id, findings.request, findings.req_pool_idx, findings.position, findings.slot,
    -1, -1, -1, -1, -1, '', findings.number, findings.forward, 1
from findings
left join events using (trace, event)
left join (
    select trace, runner, min(pool_group) as pool_group from pool_groups where lut < 0 group by all
) as of_table on of_table.trace = findings.trace and of_table.runner = findings.runner
