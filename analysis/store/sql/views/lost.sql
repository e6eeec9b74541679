-- One row a trace: how much it does not know. Every canned answer ends with it.
select
    traces.trace, traces.present, traces.complete,
    (select count(*) from losses where losses.trace = traces.trace) as losses,
    (select coalesce(try_cast(coalesce(sum(lost_events), 0) as bigint), -1) from losses where losses.trace = traces.trace) as lost_events,
    (select count(*) from losses where losses.trace = traces.trace and lost_events is null) as unknown_losses,
    (select count(*) from gaps where gaps.trace = traces.trace) as gaps
from traces
