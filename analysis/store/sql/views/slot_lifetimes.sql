-- Who held a slot from which forward to which: one row a slot and holder. Where the trace promises a complete slot
-- history, by what was told: holder is request or cache, began alloc, shared or cached, ended free, evict, cached, alloc
-- (given out again) or the request's status. Elsewhere by writes: holder is last writer, began write, ended write (another request wrote it),
-- free or evict where those are told. to_event and to_forward are null for who holds it at the end of the trace.
from lifetimes_between(0, 1::bigint << 60)
