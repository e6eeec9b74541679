"""Known bugs that look like an incident: what they say beside the rules, and that the file of them is that of this corpus."""

import json
from pathlib import Path

import pytest
from kvcanary.analysis.incidents.alike import KnownBugs, known_bugs, second_opinion
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.analysis.incidents.rules import RULES
from kvcanary.analysis.incidents.seen.evidence import evidence_of
from kvcanary.analysis.incidents.seen.traits import traits_of
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.places import DATA

TRACE = DATA / "simulated" / "mla_free_too_early.arrow"


def bug(name: str, kinds: list[str], traits: list[str]) -> dict:
    return {"name": name, "tracker": "", "kinds": kinds, "traits": traits}


@pytest.fixture(scope="module")
def lead(tmp_path_factory):
    """The cluster by which a real incident is judged, and what it looks like."""
    folder = tmp_path_factory.mktemp("report")
    replay(TRACE, settings=ReplaySettings(), report=folder)
    found = find_incidents(folder, [TRACE])
    one = found.leads[0]
    return found.rows[0], one, sorted(traits_of(one.cluster, evidence_of(one.cluster), one.likely))


def test_what_looks_the_same_is_closest_and_traits_that_all_have_say_little() -> None:
    known = KnownBugs(
        rows=(
            bug("a", ["double_free"], ["usual", "freed twice"]),
            bug("b", ["kv_changed"], ["usual", "bytes"]),
            bug("c", ["kv_changed"], ["usual", "bytes", "other"]),
        )
    )
    (first, likeness), (_second, less), *_ = known.closest(frozenset({"usual", "freed twice"}))
    assert (first, round(likeness, 6)) == (0, 1.0)
    assert less < 0.5
    assert next(known.rows[n]["name"] for n, _ in known.closest(frozenset({"bytes"}))) == "b"
    assert next(iter(known.shares(known.closest(frozenset({"usual", "bytes"}))))) == "kv_changed"
    assert known.closest(frozenset({"what nobody knows"}))[0][1] == 0
    assert known.without(names={"a"}).rows == known.rows[1:] == known.without(kinds={"double_free"}).rows
    assert KnownBugs(rows=()).closest(frozenset({"usual"})) == []


def test_a_kind_that_other_bugs_do_not_say_is_not_sure(lead) -> None:
    row, ranked, traits = lead
    kind = row["kind"]
    assert row["score"] >= 0.7
    agreed, alike = second_opinion(ranked, KnownBugs(rows=(bug("same", [kind], traits),)))
    assert agreed.kinds == ranked.kinds
    assert [(one.name, one.kind, one.likeness) for one in alike] == [("same", kind, 1.0)]
    assert {RULES[kind].branch, RULES["double_free"].branch} == {ranked.likely.branch}
    # None that looks alike is of the rule's kind, though many are: theirs stands first, and is not sure either.
    for said, count, first in (("double_free", 10, "double_free"), ("double_free", 9, kind), ("kv_changed", 10, kind)):
        many = (bug("far", [kind], ["nothing of it"]) | {"tracker": "a/b#1"} for _ in range(count))
        closest = (bug("other", [said], traits) for _ in range(5))
        other, _ = second_opinion(ranked, KnownBugs(rows=(*closest, *many)))
        assert (other.kinds[0][0], kind in dict(other.kinds)) == (first, True), (said, count)
        assert max(one.score for _, one in other.kinds) < 0.7
    # Some are: the rule's stands first, and is not sure.
    some = [bug("other", ["double_free"], traits), bug("another", ["double_free"], traits), bug("same", [kind], traits)]
    unsure, _ = second_opinion(ranked, KnownBugs(rows=tuple(some)))
    assert unsure.kinds[0][0] == kind
    assert max(one.score for _, one in unsure.kinds) < 0.7
    # Nothing looks alike, or there is nothing: rules alone speak.
    assert second_opinion(ranked, KnownBugs(rows=(bug("far", ["kv_changed"], ["nothing of it"]),))) == (ranked, [])
    assert second_opinion(ranked, KnownBugs(rows=())) == (ranked, [])


def test_the_known_bugs_are_those_of_the_corpus(lead) -> None:
    rows = {row["name"]: row for row in known_bugs().rows}
    assert len(rows) > 700
    assert all({*row["kinds"]} <= {*RULES} and row["traits"] for row in rows.values())
    said = json.loads((DATA / "corpus" / "held-out.json").read_text())
    found = {name for name, first in said.items() if first["kind"]}
    assert found <= {*rows}, "python tests/corpus/known.py makes analysis/incidents/known_bugs.parquet anew"


@pytest.mark.parametrize(
    "name", ["sglang-node_split_one_slot_early", "vllm-one_table_of_two_is_moved", "nano-cached_without_a_prefill"]
)
def test_the_known_bugs_look_as_they_do_now(tmp_path: Path, name: str) -> None:
    trace = DATA / "corpus" / f"{name}.arrow"
    replay(trace, settings=ReplaySettings(), report=tmp_path)
    lead = find_incidents(tmp_path, [trace]).leads[0]
    (row,) = (row for row in known_bugs().rows if row["name"] == name)
    now = sorted(traits_of(lead.cluster, evidence_of(lead.cluster), lead.likely))
    assert now == row["traits"], "python tests/corpus/known.py makes analysis/incidents/known_bugs.parquet anew"


def test_no_trait_names_what_is_one_recordings_own(lead) -> None:
    _, _, traits = lead
    digits = [trait for trait in traits if any(c.isdigit() for c in trait)]
    assert all(
        trait.startswith(("reason", "likely", "sign: reasons", "first: reasons", "positions apart")) for trait in digits
    )
