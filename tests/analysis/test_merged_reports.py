"""A report whose lasting violations are one row each says the same, wherever it is asked, as the report with all rows."""

import dataclasses
import json
import shutil

import pytest
from kvcanary.analysis.finishing import finish
from kvcanary.analysis.page.ask import Limits
from kvcanary.analysis.page.content import page_content
from kvcanary.analysis.store.session import open_sources
from kvcanary.analysis.store.sources import find_sources
from kvcanary.analysis.store.store import build_store
from kvcanary.analysis.store.triage import triage
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.places import DATA

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all

# Sliding windows, late samples, sweeps.
TRACES = (
    "simulated/swa_stale_mapping",
    "simulated/overlap_future_map_overrun",
    "simulated/sweeps_kv_unused_cache",
)


@pytest.fixture(scope="module", params=TRACES)
def both(request, tmp_path_factory):
    """A trace's two reports: every row, and lasting ones merged."""
    reports = []
    for name, executor in (("stepwise", "stepwise"), ("merged", "interval")):
        folder = tmp_path_factory.mktemp(name)
        trace = folder / "t.arrow"
        shutil.copy(DATA / f"{request.param}.arrow", trace)
        report = folder / "t.report"
        report.mkdir()
        summary = replay(trace, settings=ReplaySettings(executor=executor), report=report)
        assert not finish(summary)
        build_store(find_sources([report])[0])
        reports.append(report)
    return reports


@pytest.fixture(scope="module")
def sessions(both):
    """The two reports, opened once."""
    with opened(both[0]) as stepwise, opened(both[1]) as merged:
        yield stepwise, merged


@pytest.fixture(scope="module")
def pages(both, sessions):
    """What the two reports' pages show."""
    return [
        page_content(session, find_sources([report])[0], Limits())
        for report, session in zip(both, sessions, strict=True)
    ]


def opened(report):
    return open_sources(find_sources([report]))


def ask(session, sql):
    return session.sql(sql).to_pylist()


def test_rows_by_forward(sessions):
    one, other = sessions
    columns = "trace, event, forward, time_ns, mode, launch_tag, slot, position, reasons::varchar as reasons, oracle, "
    columns += "request, req_pool_idx, expected_position, first_forward, last_forward, num_forwards, writer_event"
    for relation in ("violations", "violation_forwards"):
        expected = ask(one, f"select {columns} from {relation} order by all")
        assert ask(other, f"select {columns} from violation_forwards order by all") == expected
    damage = "select * exclude (number) from damage_forwards order by all"
    assert ask(other, damage) == ask(one, damage)
    total = ask(one, "select count(*) as n, sum(num_forwards) as total from violations")[0]
    assert total["n"] == total["total"]
    assert ask(other, "select sum(num_forwards) as total from violations")[0]["total"] == total["n"]


def test_macros_and_views(sessions):
    one, other = sessions
    queries = [
        "from blast_radius()",
        "from blast_radius(1)",
        "from blast_radius(from_forward := (select median(forward)::bigint from damage_forwards))",
        "from first_bad_forward()",
        "from first_damage order by all",
        "from incidents order by incident",
        "from incident_requests order by all",
        "from neighbours((select slot from first_damage), reach := 6)",
    ]
    for row in ask(one, "select distinct request_id from damage where request_id >= 0 order by all limit 5"):
        queries.append(f"from request_timeline({row['request_id']}) order by all")
    for row in ask(one, "select distinct pool_group, slot from damage where slot > 0 order by all limit 8"):
        queries.append(f"from slot_history({row['slot']}, in_group := {row['pool_group']}) order by all")
    for query in queries:
        if query.startswith("from slot_history"):
            query = query.replace("from", "select * exclude (token) from", 1)
        found = ask(other, query)
        assert found == ask(one, query), query
        assert found or "neighbours" in query or "incident" in query, query


def test_triage(sessions):
    one, other = sessions
    assert dataclasses.asdict(triage(other)) == dataclasses.asdict(triage(one))


def test_the_page(pages):
    stepwise, merged = ({name: shown for name, shown in page.items() if name != "report"} for page in pages)
    assert merged == stepwise


def test_without_the_trace(both, tmp_path):
    """What is counted stays; the forwards between a row's first and last are spread."""
    queries = (
        "select sum(num_forwards) as n, min(forward) as first, max(last_forward) as last from damage",
        "select count(*) as n, min(forward) as first, max(forward) as last from damage_forwards",
        "select request, slots, found, first_forward, last_forward from blast_radius()",
    )
    found = []
    for number, report in enumerate(both):
        alone = tmp_path / f"{number}.report"
        shutil.copytree(report, alone, ignore=shutil.ignore_patterns("report.duckdb"))
        text = (alone / "summary.json").read_text().replace(str(report.parent), "/nowhere")
        (alone / "summary.json").write_text(text)
        with opened(alone) as session:
            assert not ask(session, "select present from traces")[0]["present"]
            found.append([ask(session, query) for query in queries])
    assert found[1] == found[0]


@pytest.mark.parametrize("both", TRACES[:1], indirect=True)
def test_a_page_says_where_forwards_are_a_guess(both, pages, tmp_path):
    _, merged = both
    alone = tmp_path / "alone.report"
    shutil.copytree(merged, alone, ignore=shutil.ignore_patterns("report.duckdb"))
    summary = json.loads((alone / "summary.json").read_text())
    (alone / "summary.json").write_text(json.dumps(summary | {"trace": "/nowhere/t.arrow"}))
    with opened(alone) as session:
        guessed = page_content(session, find_sources([alone])[0], Limits())
    for page, expected in ((pages[1], False), (guessed, True)):
        assert any("shown spread evenly" in said for said in page["unknown"]["words"]) == expected
