-- One row a changed entry of a full-to-SWA table: full_slot led to swa_slot from this event on.
with told as (
    select
        trace, event, kind,
        list_transform(list_zip(lut_index, lut_start, lut_count), lambda r: {
            i: r[1], start: greatest(least(r[2], 1::bigint << 61), -1), n: greatest(0, least(r[3], len(lut_slots)))
        }) as runs,
        lut_slots
    from raw_events
    where len(lut_slots) > 0
)
select
    trace, event, kind,
    unnest(flatten(list_transform(runs, lambda r: list_resize([]::bigint[], r.n, r.i)))) as lut,
    unnest(flatten(list_transform(runs, lambda r: range(r.start, r.start + r.n)))) as full_slot,
    unnest(lut_slots) as swa_slot
from told
