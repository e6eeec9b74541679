"""Known bugs that look like an incident: what they say beside the rules, and that the file of them is that of this corpus."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvcanary.analysis.incidents.alike import LEAST, KnownBugs, known_bugs, second_opinion
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.analysis.incidents.learnt import LEARNT_KINDS, USUAL, LearntKinds, learnt_kinds, said_features
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


def taught(**says: dict[str, float]) -> LearntKinds:
    """What is learnt, of single features by their names, `{kind: how many times as likely}`; nothing of the others."""
    kinds = ("kv_changed", "double_free", "free_too_early")
    weights = [[np.log(of.get(kind, 1.0)) for kind in kinds] for of in ({}, *says.values())]
    return LearntKinds(kinds=kinds, features=(USUAL, *says), weights=np.array(weights))


def test_what_looks_the_same_is_closest_and_traits_that_all_have_say_little() -> None:
    known = KnownBugs(
        learnt=taught(),
        rows=(
            bug("a", ["double_free"], ["usual", "freed twice"]),
            bug("b", ["kv_changed"], ["usual", "bytes"]),
            bug("c", ["kv_changed"], ["usual", "bytes", "other"]),
        ),
    )
    (first, likeness), (_second, less), *_ = known.closest(frozenset({"usual", "freed twice"}))
    assert (first, round(likeness, 6)) == (0, 1.0)
    assert less < 0.5
    assert next(known.rows[n]["name"] for n, _ in known.closest(frozenset({"bytes"}))) == "b"
    assert known.closest(frozenset({"what nobody knows"}))[0][1] == 0
    assert known.without({"double_free"}).rows == known.rows[1:]
    assert KnownBugs(rows=(), learnt=taught()).closest(frozenset({"usual"})) == []


def test_how_likely_a_kind_is_comes_of_all_features_and_of_nothing_unknown() -> None:
    learnt = taught(bytes={"kv_changed": 4.0}, freed={"double_free": 8.0, "free_too_early": 2.0})
    assert learnt.chances(["what nobody knows"]) == pytest.approx(dict.fromkeys(learnt.kinds, 1 / 3))
    both = learnt.chances(["freed", "bytes"])
    assert both == pytest.approx({"double_free": 8 / 14, "kv_changed": 4 / 14, "free_too_early": 2 / 14})
    assert [*both] == ["double_free", "kv_changed", "free_too_early"]
    left = learnt.chances(["freed", "bytes"], without={"double_free"})
    assert left == pytest.approx({"kv_changed": 4 / 6, "free_too_early": 2 / 6})
    assert learnt.chances(["freed"], without=learnt.kinds) == {}


def test_what_is_learnt_is_the_same_behind_its_file(tmp_path: Path) -> None:
    written = tmp_path / "learnt.parquet"
    learnt_kinds().write(written)
    assert written.read_bytes() == LEARNT_KINDS.read_bytes()
    assert {*learnt_kinds().kinds} == {*RULES}


def test_a_kind_is_sure_only_where_rules_and_known_bugs_both_are(lead) -> None:
    _, ranked, traits = lead
    (kind, of), *_ = ranked.kinds
    assert (kind, of.score >= 0.9, ranked.likely.branch) == ("free_too_early", True, RULES["double_free"].branch)
    same = (bug("same", [kind], traits),)
    rules_say = next(iter(said_features(kind, sure=False)))

    def asked(ranked=ranked, rows=same, **says):
        return second_opinion(ranked, KnownBugs(rows=rows, learnt=taught(**says)))

    agreed, alike = asked(**{rules_say: {kind: 18.0}})
    assert [(other, round(one.score, 2)) for other, one in agreed.kinds] == [
        (kind, 0.9),
        ("double_free", 0.05),
        ("kv_changed", 0.05),
    ]
    assert agreed.kinds[0][1].sentence == of.sentence
    assert [(one.name, one.kind, one.likeness) for one in alike] == [("same", kind, 1.0)]
    # No more than the rule says itself.
    assert asked(**{rules_say: {kind: 1e6}})[0].kinds[0][1].score == of.score
    # Another kind, and one of which the rule is not sure, is at most possible.
    other, _ = asked(**{rules_say: {"double_free": 98.0}})
    assert (other.kinds[0][0], other.kinds[0][1].score) == ("double_free", 0.65)
    unsure = replace(ranked, kinds=((kind, replace(of, score=0.6)),))
    assert asked(unsure, **{rules_say: {kind: 98.0}})[0].kinds[0][1].score == 0.65
    # What is of another branch than the evidence stands behind, however likely it is.
    far, _ = asked(**{rules_say: {"kv_changed": 98.0}})
    assert [other for other, _ in far.kinds] == [kind, "kv_changed"]
    assert far.kinds[0][1].score < LEAST
    # Of a rule of one's own nothing is learnt; nothing looks alike, or there is nothing: rules alone speak.
    own = replace(ranked, kinds=(("copy_leaked", of), *ranked.kinds))
    assert asked(own) == (own, alike)
    assert asked(rows=(bug("far", ["kv_changed"], ["nothing of it"]),)) == (ranked, [])
    assert asked(rows=()) == (ranked, [])


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
