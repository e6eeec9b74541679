"""What is learnt from known bugs: what features say of a kind, how far rules are trusted, and that the package's file is of this corpus."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import learning
from kvcanary.analysis.incidents.alike import known_bugs
from kvcanary.analysis.incidents.learnt import learnt_kinds, said_features

STALE = "python tests/corpus/known.py --learn makes analysis/incidents/learnt_kinds.parquet anew"


def bugs(kind: str, *traits: str, count: int) -> list[dict]:
    return [{"name": f"{kind}-{traits}-{n}", "kinds": [kind], "traits": ["all", *traits]} for n in range(count)]


def test_a_trait_says_the_kind_of_the_bugs_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "first_tries", dict)
    learnt = learning.learn(bugs("kv_changed", "bytes", count=20) + bugs("double_free", "freed", count=20))
    bytes_changed, freed = (learnt.chances(["all", trait]) for trait in ("bytes", "freed"))
    assert (next(iter(bytes_changed)), next(iter(freed))) == ("kv_changed", "double_free")
    assert min(bytes_changed["kv_changed"], freed["double_free"]) > 0.7
    neither = learnt.chances(["all"])
    assert neither["kv_changed"] == pytest.approx(neither["double_free"], abs=1e-3)


def test_rules_are_trusted_as_far_as_they_were_right_of_what_they_had_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bugs("kv_changed", count=20) + bugs("double_free", count=20)
    said = {row["name"]: (row["kinds"][0], 0.9) for row in rows}
    chances = {}
    for wrong in (0, 6, 20):
        told = said | {row["name"]: ("kv_changed", 0.9) for row in rows[20 : 20 + wrong]}
        monkeypatch.setattr(learning, "first_tries", lambda told=told: told)
        learnt = learning.learn(rows)
        chances[wrong] = learnt.chances({"all"} | said_features("kv_changed", sure=True))["kv_changed"]
    assert chances[0] > 0.8 > chances[6] > chances[20]


def test_the_file_is_learnt_from_these_bugs() -> None:
    rows, there = known_bugs().rows, learnt_kinds()
    now = learning.learn(rows)
    assert (now.kinds, now.features) == (there.kinds, there.features), STALE
    for row in rows[::20]:
        kinds = there.chances(row["traits"])
        assert now.chances(row["traits"]) == pytest.approx(kinds, abs=0.02), STALE


def test_no_round_is_judged_by_itself() -> None:
    last = max(bug.held_out for bug in learning.load().values())
    found = learning.walk(last)
    assert {one.held_out for one in found} <= {last}
    name = known_bugs().rows[0]["name"]
    assert name not in {row["name"] for row in learning.others(name).rows}
    assert learning.others("what nobody has recorded") is known_bugs()
