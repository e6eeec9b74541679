"""What known bugs say of an incident beside rules: how likely each kind is, and which of them look most like it.

Rules know mechanisms. This knows cases: the public bugs of the corpus and the faults of the lab, each by its traits.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...kernels.arrays import Float64Array
from .learnt import LearntKinds, learnt_kinds, said_features
from .ranking import Ranked
from .rules import RULES
from .seen.evidence import evidence_of
from .seen.likely import CERTAIN, POSSIBLE, known_of
from .seen.traits import Traits, traits_of

# Made by `python tests/corpus/known.py`.
KNOWN_BUGS: Final = Path(__file__).with_name("known_bugs.parquet")
KNOWN_SCHEMA: Final = pa.schema(
    [("name", pa.utf8()), ("tracker", pa.utf8()), ("kinds", pa.list_(pa.utf8())), ("traits", pa.list_(pa.utf8()))]
)
ANOTHER_KIND: Final = 0.5  # what a bug counts for the kinds that cannot be told from its own
_LISTED: Final = 3
_ALIKE: Final = 0.3  # what is less alike says nothing
_SAID: Final = 3  # the kinds that are named, the likeliest
_ABOUT: Final = 0.05  # what is no more likely than this is about as likely
_OF_A_DRAFT: Final = ("chunk_tail_predicted_token", "draft_position_plus_one")  # what no target's tokens show
LEAST: Final = 0.15  # how likely the first is to be named at all


class Alike(NamedTuple):
    """A known bug: its name, its thread (`owner/repository#number`, "" of a fault of the lab), its kind, and how alike it looks."""

    name: str
    tracker: str
    kind: str
    likeness: float


@dataclass(frozen=True, kw_only=True)
class KnownBugs:
    """Known bugs: `rows` as in `KNOWN_SCHEMA`, and what was `learnt` from them; nobody knows the kinds that are `left_out`."""

    rows: tuple[dict[str, Any], ...]
    learnt: LearntKinds
    left_out: frozenset[str] = frozenset()

    def without(self, kinds: Collection[str]) -> "KnownBugs":
        """Return those that are of none of these kinds, and what was learnt of the others."""
        rows = tuple(row for row in self.rows if not {*row["kinds"]} & {*kinds})
        return replace(self, rows=rows, left_out=frozenset(kinds))

    def closest(self, traits: Traits) -> list[tuple[int, float]]:
        """Return the numbers of the bugs that look most like this, with how much, 0 to 1."""
        if not self.rows:
            return []
        columns, weights, matrix, norms = self._weighed
        mine = np.zeros(len(weights))
        mine[[columns[trait] for trait in traits if trait in columns]] = 1
        mine *= weights
        norm = max(float(np.sqrt(mine @ mine)), 1e-9)
        likeness = (matrix @ mine) / (norms * norm)
        best = np.argsort(-likeness, kind="stable")[:_LISTED]
        return [(int(n), float(likeness[n])) for n in best]

    def likeliest(
        self, traits: Traits, best: str, score: float, branch: str, excluded: Collection[str] = ()
    ) -> list[tuple[str, float]]:
        """Return the likeliest kinds, with how likely each is, of what rules say is `best`, with `score`, and evidence of `branch`;
        kinds that are `excluded` are not among them.

        It takes both to be sure: a kind of which no rule is sure, or another, is at most possible.
        """
        sure = score >= CERTAIN
        chances = self.learnt.chances(traits | said_features(best, sure=sure), self.left_out | {*excluded})
        # What the evidence says of where it went wrong holds; the others stand behind. Of what is about as likely rules' comes first.
        likeliest = {kind: chance + _ABOUT * (kind == best) for kind, chance in chances.items()}
        order = sorted(chances, key=lambda kind: (branch not in ("", RULES[kind].branch), -likeliest[kind]))
        said, most = list[tuple[str, float]](), 1.0
        for kind in order[:_SAID]:
            if not said or chances[kind] >= _ABOUT:
                most = min(most, chances[kind], score if sure and kind == best else POSSIBLE if not said else 1.0)
                said.append((kind, most))
        return said

    @cached_property
    def _weighed(self) -> tuple[dict[str, int], Float64Array, Float64Array, Float64Array]:
        """Return traits by their columns, the weight of each, each bug's weighed traits `[bugs, traits]`, and their lengths.

        A trait weighs what it tells of a kind: how far the kinds of the bugs that have it are from those of all.
        """
        names = sorted({trait for row in self.rows for trait in row["traits"]})
        kinds = sorted({kind for row in self.rows for kind in row["kinds"]})
        columns = {name: n for n, name in enumerate(names)}
        has, of = np.zeros((len(self.rows), len(names))), np.zeros((len(self.rows), len(kinds)))
        for n, row in enumerate(self.rows):
            has[n, [columns[trait] for trait in row["traits"]]] = 1
            for place, kind in enumerate(row["kinds"]):
                of[n, kinds.index(kind)] = ANOTHER_KIND if place else 1
        usual = (of.sum(0) + 0.1) / (of.sum() + 0.1 * len(kinds))
        counts = has.T @ of
        given = (counts + 2 * usual) / (counts.sum(1, keepdims=True) + 2)
        weights = np.maximum((given * np.log(given / usual)).sum(1), 0.01)
        weighed = has * weights
        return columns, weights, weighed, np.maximum(np.sqrt((weighed**2).sum(1)), 1e-9)


@cache
def known_bugs() -> KnownBugs:
    """Return the known bugs that come with this package."""
    rows = tuple(pq.read_table(KNOWN_BUGS, schema=KNOWN_SCHEMA).to_pylist())
    return KnownBugs(rows=rows, learnt=learnt_kinds())


def second_opinion(ranked: Ranked, known: KnownBugs) -> tuple[Ranked, list[Alike]]:
    """Return a cluster's kinds by how likely known bugs make them, in the words of the rules, and the bugs most like it."""
    cluster = ranked.cluster
    if not cluster.has_trace or not known.rows:
        return ranked, []
    seen = evidence_of(cluster)
    traits = traits_of(cluster, seen, ranked.likely)
    closest = known.closest(traits)
    if closest[0][1] < _ALIKE:
        return ranked, []
    alike = [
        Alike(row["name"], row["tracker"], row["kinds"][0], round(likeness, 3))
        for row, likeness in ((known.rows[n], likeness) for n, likeness in closest)
    ]
    by_rules = dict(ranked.kinds)
    best = ranked.kinds[0][0] if ranked.kinds else ""
    if best and best not in known.learnt.kinds:  # of a rule of one's own
        return ranked, alike
    score = by_rules[best].score if best else 0.0
    excluded = () if any(sign.runner > 0 for sign in cluster.head) else _OF_A_DRAFT
    found = [
        (kind, replace(by_rules.get(kind, known_of(cluster, seen, 0.0)), score=chance))
        for kind, chance in known.likeliest(traits, best, score, ranked.likely.branch, excluded)
    ]
    return replace(ranked, kinds=tuple(found), least=LEAST), alike
