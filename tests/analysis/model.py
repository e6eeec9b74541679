"""What the library's relations must hold, by plain loops over the events: no SQL, no vectors."""

from collections import defaultdict

from kvcanary.recorder.trace.reader import TraceReader, read_trace


def forwards(path):
    """(forward, request, row, table_position, position, token, table, slot) of each token, and each batch's requests."""
    with TraceReader(path) as reader:
        header = reader.header
    tokens, batches = [], []
    for view in read_trace(path):
        if view.kind != "forward":
            continue
        forward = view.scalar("forward")
        ids, fed = view.ints("input_ids").tolist(), view.ints("positions").tolist()
        slots = view.ints("out_cache_loc").tolist()
        at = 0
        columns = [
            view.ints(name).tolist() for name in ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens")
        ]
        for row, request, prefix, extend in zip(*columns, strict=True):
            if row == 0:
                continue
            batches.append((forward, request, row, prefix, extend))
            for i in range(extend):
                for table in range(len(header.tables)):
                    slot = slots[table * len(ids) + at + i]
                    tokens.append((forward, request, row, prefix + i, fed[at + i], ids[at + i], table, slot))
            at += extend
    return tokens, batches


def swa_tokens(path):
    """(pool group, slot, full slot, forward, request, position, token) behind each full-to-SWA table, told by a dict."""
    with TraceReader(path) as reader:
        header = reader.header
    luts = [defaultdict(int) for _ in header.lut_lens]
    found = []
    for view in read_trace(path):
        values = iter(view.ints("lut_slots").tolist())
        runs = (view.ints(f"lut_{name}").tolist() for name in ("index", "start", "count"))
        for index, start, count in zip(*runs, strict=True):
            for slot in range(start, start + count):
                luts[index][slot] = next(values)
        if view.kind != "forward":
            continue
        ids, fed, slots = (view.ints(n).tolist() for n in ("input_ids", "positions", "out_cache_loc"))
        owners = []
        for row, request, extend in zip(
            *(view.ints(n).tolist() for n in ("req_pool_indices", "request_ids", "extend_lens")), strict=True
        ):
            owners += [request] * (extend if row else 0)
        for number, group in enumerate(header.groups):
            if group.lut < 0 or group.runner != view.scalar("runner"):
                continue
            for i, request in enumerate(owners):
                full = slots[group.table * len(ids) + i]
                slot = luts[group.lut][full]
                if slot:
                    found.append((number, slot, full, view.scalar("forward"), request, fed[i], ids[i]))
    return found


def lifetimes(path):
    """(group, slot, holder, request, began, ended, from event, to event) of a trace with a complete slot history."""
    held, shared, done = {}, defaultdict(list), []
    for view in read_trace(path):
        event, request = view.scalar("event"), view.scalar("request_id")
        if view.kind == "status" and view.scalar("status") != "admitted":
            for key, joined in shared.items():
                for item in [j for j in joined if j[0] == request]:
                    done.append((*key, "request", request, "shared", view.scalar("status"), item[1], event))
                    joined.remove(item)
        if view.kind not in ("alloc", "free", "evict"):
            continue
        what = view.kind if view.kind != "alloc" else view.scalar("status") or "alloc"
        runs = (view.ints(f"slot_{name}").tolist() for name in ("group", "start", "count"))
        for group, start, count in zip(*runs, strict=True):
            for slot in range(start, start + count):
                key = (group, slot)
                if what == "shared":
                    shared[key].append((request, event))
                    continue
                if key in held:
                    holder, whose, began, since = held.pop(key)
                    done.append((*key, holder, whose, began, what, since, event))
                if what in ("free", "evict"):
                    for whose, since in shared.pop(key, []):
                        done.append((*key, "request", whose, "shared", what, since, event))
                else:
                    cache = what == "cached" or request < 0
                    held[key] = ("cache" if cache else "request", -1 if cache else request, what, event)
    done += [(*key, *life[:3], None, life[3], None) for key, life in held.items()]
    done += [(*key, "request", whose, "shared", None, since, None) for key, js in shared.items() for whose, since in js]
    return done


def runs(view, prefix, *columns):
    """Zip the run columns of an event."""
    return zip(*(view.ints(f"{prefix}_{name}").tolist() for name in columns), strict=True)


def table_and_readers(path):
    """({forward: {(table, row, position): slot} as it leaves it}, {forward: [(group, slot, request, row, position) it reads]})."""
    with TraceReader(path) as reader:
        header = reader.header
    table, luts, left, read = {}, [defaultdict(int) for _ in header.lut_lens], {}, {}
    for view in read_trace(path):
        values = iter(view.ints("lut_slots").tolist())
        for index, start, count in runs(view, "lut", "index", "start", "count"):
            luts[index].update((slot, next(values)) for slot in range(start, start + count))
        values = iter(view.ints("table_slots").tolist())
        for index, row, start, count in runs(view, "table", "index", "row", "start", "count"):
            table.update(((index, row, start + i), next(values)) for i in range(count))
        if view.kind != "forward":
            continue
        forward, reads, at = view.scalar("forward"), [], 0
        ids, slots = view.ints("input_ids").tolist(), view.ints("out_cache_loc").tolist()
        names = ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens")
        batch = [one for one in zip(*(view.ints(name).tolist() for name in names), strict=True) if one[0]]
        for row, request, prefix, _ in batch:
            for number, group in enumerate(header.groups):
                if group.runner != view.scalar("runner"):
                    continue
                for position in range(max(0, prefix - group.window) if group.window else 0, prefix):
                    slot = table.get((group.table, row, position))
                    slot = slot if group.lut < 0 or slot is None else luts[group.lut][slot]
                    reads.append((number, slot, request, row, position))
        for row, _, prefix, extend in batch:
            for index in range(len(header.tables)):
                for i in range(extend):
                    table[index, row, prefix + i] = slots[index * len(ids) + at + i]
            at += extend
        left[forward], read[forward] = dict(table), reads
    return left, read
