"""Which known bugs look most like an incident, and whether they were of the kind that rules have found.

Rules know mechanisms. This knows cases: the public bugs of the corpus and the faults of the lab, each by its traits. Where both
say the same, it is so far more often than where one of them says it alone; that is what a confidence of 0.7 and more takes.
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
from .ranking import Ranked
from .rules import RULES
from .seen.evidence import evidence_of
from .seen.likely import CERTAIN, ONLY_LIKELY, POSSIBLE, known_of
from .seen.traits import Traits, traits_of

# Made by `python tests/corpus/known.py`.
KNOWN_BUGS: Final = Path(__file__).with_name("known_bugs.parquet")
KNOWN_SCHEMA: Final = pa.schema(
    [("name", pa.utf8()), ("tracker", pa.utf8()), ("kinds", pa.list_(pa.utf8())), ("traits", pa.list_(pa.utf8()))]
)
_CLOSEST: Final = 5
_LISTED: Final = 3
_ALIKE: Final = 0.3  # what is less alike says nothing
# The numbers below are chosen by how well the rounds before a round of held-out bugs told its kinds (12 to 39).
_ANOTHER_KIND: Final = 0.7  # what a bug counts for the kinds that cannot be told from its own
_SHARPNESS: Final = 8  # the power of a likeness that is its weight
_SOME: Final = 0.3  # of the share that the most frequent kind has: with less, a rule's kind may stand behind that
_MOST: Final = 0.8  # of the closest; with less, their kind is no more than likely
_MANY: Final = 10  # public bugs of a kind, of which one that is of it should be among the closest


class Alike(NamedTuple):
    """A known bug: its name, its thread (`owner/repository#number`, "" of a fault of the lab), its kind, and how alike it looks."""

    name: str
    tracker: str
    kind: str
    likeness: float


@dataclass(frozen=True, kw_only=True)
class KnownBugs:
    """Known bugs: `rows` as in `KNOWN_SCHEMA`."""

    rows: tuple[dict[str, Any], ...]

    def without(self, *, names: Collection[str] = (), kinds: Collection[str] = ()) -> "KnownBugs":
        """Return those that do not have one of these names, and none of these kinds."""
        kept = (row for row in self.rows if row["name"] not in names and not {*row["kinds"]} & {*kinds})
        return KnownBugs(rows=tuple(kept))

    def closest(self, traits: Traits) -> list[tuple[int, float]]:
        """Return the numbers of the bugs that look most like this, with how much, 0 to 1."""
        if not self.rows:
            return []
        columns, weights, matrix, norms = self._learnt
        mine = np.zeros(len(weights))
        mine[[columns[trait] for trait in traits if trait in columns]] = 1
        mine *= weights
        norm = max(float(np.sqrt(mine @ mine)), 1e-9)
        likeness = (matrix @ mine) / (norms * norm)
        best = np.argsort(-likeness, kind="stable")[:_CLOSEST]
        return [(int(n), float(likeness[n])) for n in best]

    def shares(self, closest: list[tuple[int, float]]) -> dict[str, float]:
        """Return what share of the closest bugs, by likeness, is of each kind, the most frequent first."""
        total = sum(likeness**_SHARPNESS for _, likeness in closest) or 1.0
        found: dict[str, float] = {}
        for number, likeness in closest:
            for place, kind in enumerate(self.rows[number]["kinds"]):
                part = likeness**_SHARPNESS / total * (_ANOTHER_KIND if place else 1)
                found[kind] = found.get(kind, 0.0) + part
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def _learnt(self) -> tuple[dict[str, int], Float64Array, Float64Array, Float64Array]:
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
                of[n, kinds.index(kind)] = _ANOTHER_KIND if place else 1
        usual = (of.sum(0) + 0.1) / (of.sum() + 0.1 * len(kinds))
        counts = has.T @ of
        given = (counts + 2 * usual) / (counts.sum(1, keepdims=True) + 2)
        weights = np.maximum((given * np.log(given / usual)).sum(1), 0.01)
        weighed = has * weights
        return columns, weights, weighed, np.maximum(np.sqrt((weighed**2).sum(1)), 1e-9)


@cache
def known_bugs() -> KnownBugs:
    """Return the known bugs that come with this package."""
    return KnownBugs(rows=tuple(pq.read_table(KNOWN_BUGS, schema=KNOWN_SCHEMA).to_pylist()))


def second_opinion(ranked: Ranked, known: KnownBugs) -> tuple[Ranked, list[Alike]]:
    """Return a cluster's kinds as they are ranked by rules and by known bugs, and the bugs that look most like it.

    A rule that is sure keeps its score if the known bugs say the same; else it is not sure. It stands first all the same, unless next
    to none of the closest is of its kind, of which there are many: then the kind of theirs that is of the evidence's branch does.
    """
    cluster = ranked.cluster
    if not cluster.has_trace or not known.rows:
        return ranked, []
    seen = evidence_of(cluster)
    closest = known.closest(traits_of(cluster, seen, ranked.likely))
    if closest[0][1] < _ALIKE:
        return ranked, []
    shares = known.shares(closest)
    alike = [
        Alike(row["name"], row["tracker"], row["kinds"][0], round(likeness, 3))
        for row, likeness in ((known.rows[n], likeness) for n, likeness in closest[:_LISTED])
    ]
    most = max(shares.values())
    best, of = ranked.kinds[0] if ranked.kinds else ("", None)
    sure = of is not None and of.score >= CERTAIN
    if sure and shares.get(best, 0.0) >= most:
        return ranked, alike
    # What the evidence says of where it went wrong holds for kinds that known bugs say as well.
    inside = [one for one in shares.items() if ranked.likely.branch in ("", RULES[one[0]].branch)]
    if not inside and not sure:
        return ranked, alike
    fits = best != "" and ranked.likely.branch in ("", RULES[best].branch)
    kind, share = inside[0] if inside else (best, 0.0)
    few = sure and sum(row["kinds"][0] == best and row["tracker"] != "" for row in known.rows) < _MANY
    first = best if few or not inside or (fits and shares.get(best, 0.0) >= _SOME * most) else kind
    kinds = {other: replace(one, score=min(one.score, ONLY_LIKELY)) for other, one in ranked.kinds}
    said = kinds.get(first, known_of(cluster, seen, 0.0))
    own = min(of.score, POSSIBLE) if of is not None and first == best else ONLY_LIKELY
    kinds[first] = replace(said, score=POSSIBLE if first == kind and share >= _MOST else max(own, ONLY_LIKELY))
    kinds.setdefault(kind, known_of(cluster, seen, ONLY_LIKELY))
    order = sorted(kinds.items(), key=lambda item: (item[0] != first, -item[1].score))
    return replace(ranked, kinds=tuple(order)), alike
