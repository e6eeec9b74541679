"""Every relation that is computed from events, against plain loops over the same events."""

import pytest
from kvcanary.analysis import open_traces
from kvcanary.analysis.store.library import BASE, DERIVED
from kvcanary.recorder.trace.reader import read_trace

from ..support.places import DATA
from . import model
from .recorded import CONFIGS, REAL

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all


def rows(session, query):
    return [tuple(row.values()) for row in session.sql(query).to_pylist()]


def traces_of(engines, pair):
    paths = {name: path for name, (path, _) in engines.items()}
    return paths | {"prefill": pair[0], "decode": pair[1]} | {name: DATA / f"{name}.arrow" for name in REAL}


NAMES = [*CONFIGS, "prefill", "decode", *REAL]


@pytest.fixture(scope="module", params=NAMES)
def opened(request, engines, pair):
    path = traces_of(engines, pair)[request.param]
    with open_traces(path) as session:
        yield path, session


@pytest.mark.one_in(6)
def test_tokens_and_batches(opened):
    path, session = opened
    tokens, batches = model.forwards(path)
    assert tokens
    columns = "forward, request_id, req_pool_idx, table_position, position, token, table_index, slot"
    assert sorted(rows(session, f"select {columns} from tokens")) == sorted(tokens)
    columns = "forward, request_id, req_pool_idx, prefix_len, extend_len"
    assert sorted(rows(session, f"select {columns} from forward_requests")) == sorted(batches)
    written = {}
    for forward, *_ in tokens:
        written[forward] = written.get(forward, 0) + 1
    tables = len({token[6] for token in tokens})
    told = rows(session, "select forward, num_tokens, num_padding, num_requests from forwards")
    assert all(total - padding == written.get(forward, 0) // tables for forward, total, padding, _ in told)
    assert sum(requests for *_, requests in told) == len(batches)


def test_slots_behind_a_full_to_swa_table(opened):
    path, session = opened
    columns = "pool_group, slot, full_slot, forward, request_id, position, token"
    assert sorted(rows(session, f"select {columns} from swa_tokens")) == sorted(model.swa_tokens(path))
    full = rows(session, "select pool_group, slot from slot_writes where pool_group in "
                "(select pool_group from pool_groups where lut < 0)")  # fmt: skip
    groups = rows(session, "select pool_group, runner, table_index from pool_groups where lut < 0")
    direct = rows(session, "select runner, table_index, slot from tokens")
    assert sorted(full) == sorted(
        (g, slot) for g, r, t in groups for runner, table, slot in direct if (r, t) == (runner, table)
    )


def test_lifetimes(opened):
    path, session = opened
    if rows(session, "select slot_history from traces") != [("complete",)]:
        check_lifetimes_by_writes(path, session)
        return
    columns = "pool_group, slot, holder, request_id, began, ended, from_event, to_event"
    expected = sorted(model.lifetimes(path), key=str)
    assert expected
    assert sorted(rows(session, f"select {columns} from slot_lifetimes"), key=str) == expected
    _group, slot = expected[len(expected) // 2][:2]
    mine = [life for life in expected if life[1] == slot]
    assert sorted(rows(session, f"select {columns} from lifetimes_between({slot}, {slot})"), key=str) == mine
    numbers = sorted(
        (view.scalar("event"), view.scalar("forward")) for view in read_trace(path) if view.kind == "forward"
    )
    for since, until, first, last in rows(
        session, f"select from_event, to_event, from_forward, to_forward from slot_lifetimes where slot = {slot}"
    ):
        assert first == next((forward for event, forward in numbers if event > since), None)
        before = [forward for event, forward in numbers if until is not None and event < until]
        assert last == (max(before, default=-1) if until is not None else None)


def check_lifetimes_by_writes(path, session):
    """A slot is whose who wrote it last, until another writes it or it is given back."""
    told = {}
    for view in read_trace(path):
        if view.kind in ("free", "evict"):
            for group, start, count in model.runs(view, "slot", "group", "start", "count"):
                for slot in range(start, start + count):
                    told.setdefault((group, slot), []).append((view.scalar("event"), view.kind, None))
    for group, slot, event, request in rows(session, "select pool_group, slot, event, request_id from slot_writes"):
        told.setdefault((group, slot), []).append((event, "write", request))
    expected = set()
    for (group, slot), points in told.items():
        holder = None
        for event, what, request in sorted(points):
            if holder is not None and (what != "write" or request != holder[0]):
                expected.add((group, slot, *holder, what, event))
                holder = None
            if what == "write" and holder is None:
                holder = (request, event)
        if holder is not None:
            expected.add((group, slot, *holder, None, None))
    columns = "pool_group, slot, request_id, from_event, ended, to_event"
    assert set(rows(session, f"select {columns} from slot_lifetimes")) == expected


def test_changes_copies_sweeps_and_samples(opened):
    path, session = opened
    table, kv, copies, sweeps, luts, samples, slots = [], [], [], [], [], [], []
    batches = {}
    for view in read_trace(path):
        event = view.scalar("event")
        values = iter(view.ints("table_slots").tolist())
        for index, row, start, count in model.runs(view, "table", "index", "row", "start", "count"):
            table += [(event, index, row, start + i, next(values)) for i in range(count)]
        values = iter(view.ints("lut_slots").tolist())
        for index, start, count in model.runs(view, "lut", "index", "start", "count"):
            luts += [(event, index, start + i, next(values)) for i in range(count)]
        kv += [(event, *change[:2], ("before", "after")[change[2]])
               for change in model.runs(view, "kv_change", "stream", "slot", "phase")]  # fmt: skip
        copies += [
            (event, *c) for c in model.runs(view, "copy", "group", "src_tier", "src", "dst_tier", "dst", "count")
        ]
        sweeps += [(event, *s) for s in model.runs(view, "sweep", "group", "slot", "position", "prev", "locked")]
        if view.kind in ("alloc", "free", "evict"):
            slots += [(event, *run) for run in model.runs(view, "slot", "group", "start", "count")]
        if view.kind == "forward":
            batches[view.scalar("forward")] = view.ints("request_ids").tolist()
        if view.kind in ("forward", "sample"):
            values = iter(view.ints("sampled_tokens").tolist())
            for i, count in enumerate(view.ints("sampled_lens").tolist()):
                forward = view.scalar("forward")
                samples += [(event, forward, batches[forward][i], n, next(values)) for n in range(count)]
    for query, expected in {
        "select event, table_index, req_pool_idx, position, slot from table_changes": table,
        "select event, lut, full_slot, swa_slot from lut_changes": luts,
        "select event, stream, slot, phase from kv_changes": kv,
        "select event, pool_group, src_tier, src_start, dst_tier, dst_start, slot_count from copies": copies,
        "select event, pool_group, slot, position, prev_slot, locked from sweeps": sweeps,
        "select event, pool_group, slot_start, slot_count from slot_events": slots,
        "select event, forward, request_id, number, token from samples where request_id is not null": samples,
    }.items():
        assert sorted(rows(session, query)) == sorted(expected), query
    assert samples


def test_requests(opened):
    path, session = opened
    _, batches = model.forwards(path)
    named = {
        v.scalar("request_id"): (v.scalar("name"), v.scalar("prompt_len"))
        for v in read_trace(path)
        if v.kind == "request"
    }
    statuses = {v.scalar("request_id"): v.scalar("status") for v in read_trace(path) if v.kind == "status"}
    found = session.sql("from requests").to_pylist()
    assert {row["request_id"] for row in found} == named.keys() | {batch[1] for batch in batches}
    for row in found:
        mine = [batch for batch in batches if batch[1] == row["request_id"]]
        assert (row["name"], row["prompt_len"]) == named.get(row["request_id"], (str(row["request_id"]), -1))
        assert row["status"] == statuses.get(row["request_id"], "")
        assert row["num_forwards"] == len(mine)
        assert row["num_tokens"] == sum(batch[4] for batch in mine)
        if mine:
            assert (row["first_forward"], row["last_forward"]) == (mine[0][0], mine[-1][0])
            assert row["prefix_hit"] == mine[0][3]


def test_the_traces_above_hold_something_of_everything(engines, pair):
    """Or the comparisons would hold for relations that are always empty."""
    with open_traces(*traces_of(engines, pair).values()) as session:
        for name in ("copies", "sweeps", "kv_changes", "lut_changes", "swa_tokens", "transfers", "transfer_slots", "marks",
                     "statuses", "slot_events", "table_changes", "samples", "chunks"):  # fmt: skip
            assert session.sql(f"select count(*) as n from {name}")["n"][0].as_py() > 0, name
        assert session.sql("select max(num_padding) as n from forwards")["n"][0].as_py() > 0
        assert session.sql("select count(*) as n from samples join forwards using (trace, forward) "
                           "where samples.event > forwards.event")["n"][0].as_py() > 0  # fmt: skip


def test_transfers(pair):
    for path in pair:
        expected = []
        for view in read_trace(path):
            if view.kind == "transfer":
                position = view.ints("prefix_lens").tolist()[0]
                for group, start, count in model.runs(view, "slot", "group", "start", "count"):
                    expected.append(
                        (
                            view.scalar("event"),
                            view.scalar("mode"),
                            view.scalar("status"),
                            group,
                            start,
                            count,
                            position,
                        )
                    )
                    position += count
        with open_traces(path) as session:
            columns = "event, direction, status, pool_group, slot_start, slot_count, position"
            assert sorted(rows(session, f"select {columns} from transfer_slots")) == sorted(expected)
            totals = rows(session, "select sum(num_slots)::bigint from transfers")
            assert totals == [(sum(row[5] for row in expected),)]


@pytest.mark.parametrize("name", ["paged", "sliding", "eagle", "host", "overlap"])
def test_open_lifetimes_are_what_the_engine_holds_at_the_end(engines, name):
    path, engine = engines[name]
    page = engine.config.page_size
    held = {p * page + i for p in engine.memory.allocator.held_pages().tolist() for i in range(page)}
    with open_traces(path) as session:
        open_now = rows(
            session, "select slot from slot_lifetimes where to_event is null and began <> 'shared' and pool_group = 0"
        )
    assert {slot for (slot,) in open_now} == held
    assert len(open_now) == len(held)


@pytest.mark.parametrize("name", ["eagle", "sliding", "table_swap"])
def test_block_tables_their_differences_and_who_reads_a_slot(name, engines, pair):
    path = traces_of(engines, pair)[name]
    left, read = model.table_and_readers(path)
    _, batches = model.forwards(path)
    lengths = {(forward, request): (row, prefix + extend) for forward, request, row, prefix, extend in batches}
    ran = sorted(forward for forward, request in lengths if request == batches[len(batches) // 2][1])
    request, early, late = batches[len(batches) // 2][1], ran[len(ran) // 3], ran[-1]

    def table(forward):
        row, length = lengths[forward, request]
        kept = left[forward].items()
        return {(index, position): slot for (index, r, position), slot in kept if r == row and position < length}

    with open_traces(path) as session:
        found = rows(session, f"select table_index, position, slot from block_table({request}, {late})")
        assert {(index, position): slot for index, position, slot in found} == table(late)
        before, after = table(early), table(late)
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        found = rows(
            session, f"select table_index, position, from_slot, to_slot from table_diff({request}, {early}, {late})"
        )
        assert changed
        assert sorted(found) == sorted((*key, before.get(key), after.get(key)) for key in changed)
        for group in {entry[0] for entries in read.values() for entry in entries}:
            slots = [entry[1] for entries in read.values() for entry in entries if entry[0] == group and entry[1]]
            slot = max(slots, key=slots.count)  # what most read
            expected = [
                (forward, *entry[2:])
                for forward, entries in read.items()
                for entry in entries
                if entry[:2] == (group, slot)
            ]
            columns = "forward, request_id, req_pool_idx, position"
            found = rows(session, f"select {columns} from readers({slot}, 0, 1000000, in_group := {group})")
            assert sorted(found) == sorted(expected)
            middle = expected[len(expected) // 2][0]
            found = rows(session, f"select {columns} from readers({slot}, {middle}, {middle}, in_group := {group})")
            assert sorted(found) == sorted(one for one in expected if one[0] == middle)


@pytest.mark.one_in(6)
def test_every_request_id_has_its_name_beside_it_and_trace_comes_last(opened):
    _, session = opened
    names = dict(rows(session, "select request_id, name from requests"))
    for name in [*BASE, *(name for folder, name in DERIVED if folder == "views")]:
        columns = session.sql(f"from {name} limit 0").column_names
        assert columns[-1] == "trace", name
        if "request_id" not in columns:
            continue
        assert columns.index("request") == columns.index("request_id") + 1 or name in ("violations", "findings"), name
    for name in ("tokens", "samples", "statuses", "slot_events"):
        for request_id, request in rows(session, f"select distinct request_id, request from {name}"):
            assert request == (names[request_id] if request_id is not None and request_id >= 0 else None), name
    keywords = rows(session, "select keyword_name from duckdb_keywords() where keyword_category = 'reserved'")
    found = rows(
        session, "select column_name from information_schema.columns where table_name not like '\\_%' escape '\\'"
    )
    assert not {*keywords} & {*found}
