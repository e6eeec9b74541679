-- One row a note in the trace; an injected fault's ground truth is one, its labels are JSON.
select trace, event, time_ns, forward, note, labels from raw_events where kind = 'mark'
