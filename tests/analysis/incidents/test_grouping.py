"""What belongs together: one fault however often it is seen, two faults in one trace, too many places to hold."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis.incidents.cluster import Cluster
from kvcanary.analysis.incidents.facts import FACTS_A_SLOT, Fact, Facts, SlotFacts
from kvcanary.analysis.incidents.finding import find_incidents, read_incidents, write_incidents
from kvcanary.analysis.incidents.linking import components, page_nodes
from kvcanary.analysis.incidents.places import read_places
from kvcanary.analysis.incidents.seen.evidence import evidence_of
from kvcanary.analysis.incidents.seen.likely import Likely, left_open
from kvcanary.analysis.incidents.seen.observed import went_elsewhere
from kvcanary.analysis.incidents.sign import TOKEN, Sign
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.trace.header import PoolGroup, TraceHeader
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.effect import Clock, Probe
from kvcanary.replayer.lab.fault import Bench
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings


def copied(report, folder):
    folder.mkdir()
    for name in ("violations.parquet", "findings.parquet", "summary.json"):
        (folder / name).write_bytes((report / name).read_bytes())
    return folder


@pytest.mark.parametrize(("given_in", "elsewhere"), [(2, True), (50, False)])
def test_a_token_went_elsewhere_only_if_its_row_is_right_where_it_was_written_before(given_in, elsewhere):
    # Position 3 was written to slot 7 in event 9, and is looked for in slot 5. If that was given later, the row is wrong.
    nowhere = dict.fromkeys(("event", "forward", "runner", "group", "row"), 0)
    words = {"mode": "", "request": ""}
    looked = Sign(**nowhere | {"event": 99}, **words, kind="attention_slots", bits=0, request_id=1, position=8, slot=6)
    before = Sign(**nowhere | {"event": 99}, **words, kind="", bits=TOKEN, request_id=1, position=3, slot=5)
    slots = {(0, slot): SlotFacts(99) for slot in (5, 6)}
    slots[0, 5].add(Fact(event=given_in, what="alloc", request_id=1))
    slots[0, 6].add(Fact(event=1, what="alloc", request_id=1))
    facts = Facts(header=TraceHeader(groups=(), tables=()), slots=slots, prefixes={(99, 1): 8})
    facts.wrote[1, 3].append((9, 7))
    cluster = Cluster(signs=[looked, before], kinds=Counter(), reasons=Counter(), facts=facts)
    assert went_elsewhere(cluster, looked) is elsewhere


@pytest.mark.parametrize(
    ("owner", "others", "elsewhere"),
    [(2, (), True), (1, (), False), (2, ("alloc",), False), (-1, (), False)],
    ids=["anothers", "its own", "somebody has it", "nobodys"],
)
def test_a_token_that_went_over_anothers_went_elsewhere_where_nobody_has_what_is_looked_at(owner, others, elsewhere):
    # In event 99 the token of position 8 went to slot 7, which is that of request `owner`; attention looks at slot 6.
    nowhere = dict.fromkeys(("event", "forward", "runner", "group", "row"), 0)
    looked = Sign(
        **nowhere | {"event": 99}, mode="", request="", kind="attention_slots", bits=0, request_id=1, position=8, slot=6
    )
    slots = {(0, slot): SlotFacts(99) for slot in (6, 7)}
    for event, what in ((2, "alloc"), (3, "written")):
        slots[0, 7].add(Fact(event=event, what=what, request_id=owner))
    for what in others:
        slots[0, 6].add(Fact(event=4, what=what, request_id=3))
    facts = Facts(header=TraceHeader(groups=(), tables=()), slots=slots, prefixes={(99, 1): 8})
    facts.wrote[1, 8].append((99, 7))
    cluster = Cluster(signs=[looked], kinds=Counter(), reasons=Counter(), facts=facts)
    assert went_elsewhere(cluster, looked) is elsewhere


@pytest.mark.parametrize(
    ("promised", "writes", "said"),
    [
        ("complete", 1, "it was never given to it, and another request wrote it"),
        ("complete", FACTS_A_SLOT, "no recorded event gave it to the request, and another request wrote it"),
        ("", 1, "no recorded event gave it to the request, and another request wrote it"),
    ],
)
def test_that_a_slot_was_never_given_is_said_only_where_all_is_recorded(promised, writes, said):
    nowhere = dict.fromkeys(("event", "forward", "runner", "group", "request_id", "row", "position", "slot"), 0)
    sign = Sign(**{**nowhere, "event": 99, "slot": 5, "request_id": 1}, kind="", bits=TOKEN, mode="", request="")
    slot = SlotFacts(99)
    for event in range(writes):
        slot.add(Fact(event=event, what="written", request_id=2))
    facts = Facts(header=TraceHeader(groups=(), tables=(), slot_history=promised), slots={(0, 5): slot})
    cluster = Cluster(signs=[sign], kinds=Counter(), reasons=Counter(), facts=facts)
    seen = evidence_of(cluster)
    [(_, diagnosis)] = left_open([], cluster, seen, Likely("write", ("slot_mapping",)))
    assert diagnosis.sentence.endswith(f"of slot 5 is known that {said}")


def test_a_hundred_thousand_violations_of_one_fault_are_one_incident(tried, tmp_path):
    trial = tried("kv_used", "mha_page16", 2)
    report = copied(trial.reports[0], tmp_path / "many.report")
    table = pq.read_table(report / "violations.parquet")
    times = 120_000 // table.num_rows + 1
    index = pa.array(np.tile(np.arange(table.num_rows), times))
    forwards = pa.array(np.repeat(np.arange(times), table.num_rows) + 1000)
    many = table.take(index).set_column(table.schema.get_field_index("last_forward"), "last_forward", forwards)
    pq.write_table(many, report / "violations.parquet")
    found = find_incidents(report, trial.traces)
    [row] = found.rows
    assert row["kind"] == "kv_changed"
    assert row["violations"] == sum(many["num_forwards"].to_pylist()) > many.num_rows > 100_000
    assert row["last_forward"] == 1000 + times - 1
    assert len(found.places) < 100
    write_incidents(report, found)
    members = pq.read_table(report / "incident_members.parquet")
    assert members.num_rows == many.num_rows + pq.read_metadata(report / "findings.parquet").num_rows
    assert set(members["incident"].to_pylist()) == {1}


@pytest.fixture(scope="module")
def two_faults(tmp_path_factory):
    """A trace of one engine in which two things go wrong, independent of one another."""
    folder = tmp_path_factory.mktemp("two")
    configuration = CONFIGURATIONS["mha"]
    clock = Clock()
    with SimulatedEngine(configuration.engine_config(5), configuration.requests(5), folder / "two.arrow") as engine:
        probe = Probe(engine, clock)
        benches = [
            Bench(name, engine, probe, clock, np.random.default_rng(7), starts_at=begin)
            for name, begin in (("kv_used", 12), ("next_token_swap", 60))
        ]
        for bench in benches:
            FAULTS[bench.fault].arm(bench)
        while engine.step():
            for bench in benches:
                bench.stepped()
    assert all(bench.injections for bench in benches)
    report = folder / "two.report"
    report.mkdir()
    replay(folder / "two.arrow", settings=ReplaySettings(), report=report)
    return folder / "two.arrow", report


def test_two_faults_in_one_trace_are_two_incidents(two_faults):
    trace, report = two_faults
    found = find_incidents(report, [trace])
    assert [row["kind"] for row in found.rows] == ["kv_changed", "next_token_swap"]
    assert [row["incident"] for row in found.rows] == [1, 2]
    write_incidents(report, found)
    members = pq.read_table(report / "incident_members.parquet").to_pylist()
    table = pq.read_table(report / "violations.parquet").to_pylist()
    for member in members:
        if member["source"] == "violation":
            is_flip = "KV_HASH" in table[member["number"]]["reasons"]
            assert member["incident"] == (1 if is_flip else 2)
    assert sum(row["violations"] for row in found.rows) == sum(row["num_forwards"] for row in table) > len(table)
    assert [row["kind"] for row in read_incidents(report)] == ["kv_changed", "next_token_swap"]


def test_places_beyond_the_limit_are_counted_together_and_nothing_is_lost(tried, tmp_path):
    trial = tried("radix_insert_then_free", "mha", 3)
    all_of_them = read_places(trial.reports[0])
    few = read_places(trial.reports[0], limit=64)
    assert len(few) <= 64 < len(all_of_them)
    assert few.shift > 0
    assert few["rows"].sum() == all_of_them["rows"].sum()
    report = copied(trial.reports[0], tmp_path / "few.report")
    found = find_incidents(report, trial.traces, max_places=64)
    assert found.rows[0]["kind"] == "radix_insert_then_free"
    write_incidents(report, found)
    rows = sum(pq.read_metadata(report / f"{name}.parquet").num_rows for name in ("violations", "findings"))
    assert pq.read_metadata(report / "incident_members.parquet").num_rows == rows


def test_components_are_those_of_a_plain_search():
    random = np.random.default_rng(3)
    for _ in range(50):
        count = int(random.integers(1, 40))
        a, b = random.integers(0, count, (2, int(random.integers(0, 40))))
        expected = list(range(count))
        for _ in range(count):
            for one, other in zip(a.tolist(), b.tolist(), strict=True):
                low = min(expected[one], expected[other])
                expected = [low if label in (expected[one], expected[other]) else label for label in expected]
        assert components(count, a, b).tolist() == expected


def test_pages_of_groups_that_share_a_table_are_the_same():
    groups = (
        PoolGroup(name="target", num_slots=64, page_size=4),
        PoolGroup(name="draft", num_slots=64, page_size=4, runner=1),
        PoolGroup(name="sliding", num_slots=64, page_size=4, lut=0, kind="swa", window=8),
    )
    of = lambda group, slot: int(page_nodes(np.array([group]), np.array([slot]), groups)[0])  # noqa: E731
    assert of(0, 5) == of(1, 6) == of(-1, 7)
    assert of(0, 5) != of(0, 8)
    assert of(2, 5) != of(0, 5)
    assert of(0, 0) == of(0, -1) == -1
    assert of(77, 5) != of(77, 6)  # a group that the header does not have: nothing is known of its pages
