"""The search itself: over versions 0 .. n - 1, of which the first is good and the last bad."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Mark(Enum):
    """Good, bad, or skipped, as `git bisect` calls them."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectVerdict:
    """A mark, why in words, and what was seen: plain JSON values."""

    mark: Mark
    words: str
    seen: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"outcome": self.mark.value, "words": self.words, "seen": self.seen}

    @classmethod
    def from_json(cls, raw: Any) -> "BisectVerdict":
        """Return what `to_json` made; raise `ValueError` for anything else."""
        if not isinstance(raw, dict) or not isinstance(raw.get("words"), str) or not isinstance(raw.get("seen"), dict):
            raise ValueError("no judgement")  # noqa: TRY004  # whatever is wrong with a cached file is one error
        return cls(mark=Mark(raw.get("outcome")), words=raw["words"], seen=raw["seen"])


def vote(verdicts: Sequence[BisectVerdict], rule: str) -> BisectVerdict:
    """Return what several traces of one version make of it.

    `rule` "any": bad if one is. "majority": as most of those that could be judged; a draw is bad, because a violation
    proves a fault and a clean trace does not prove that there is none. Without one that could be judged: skip.
    """
    bad = [j for j in verdicts if j.mark is Mark.BAD]
    good = [j for j in verdicts if j.mark is Mark.GOOD]
    if not bad and not good:
        return BisectVerdict(mark=Mark.SKIP, words=verdicts[0].words if verdicts else "no trace")
    chosen = bad if bad and (rule == "any" or len(bad) >= len(good)) else good
    words = chosen[0].words
    if len(verdicts) > 1:
        words += f"   ({len(bad)} bad, {len(good)} good, {len(verdicts) - len(bad) - len(good)} not to be judged)"
    return BisectVerdict(mark=chosen[0].mark, words=words, seen=chosen[0].seen)


def decided(verdicts: Sequence[BisectVerdict], rule: str, left: int) -> bool:
    """Whether `left` more trials could not change the vote."""
    bad = sum(j.mark is Mark.BAD for j in verdicts)
    good = sum(j.mark is Mark.GOOD for j in verdicts)
    if rule == "any":
        return bad > 0
    return (bad >= good + left and bad > 0) or good > bad + left


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Where a search ended: `good` and `bad` are the last version known to be good and the first known to be bad, or -1.

    `candidates` are those of which one is the first bad: one, or several where others could not be judged. `judged` holds
    every verdict in the order in which it was made. `problem` says why there is no answer.
    """

    good: int
    bad: int
    candidates: tuple[int, ...]
    judged: tuple[tuple[int, BisectVerdict], ...]
    problem: str = ""


def search(count: int, judge: Callable[[int], BisectVerdict], *, inward: bool = True) -> Search:
    """Verify both ends of `count` versions, then halve; `judge` is called at most once for each.

    A version that cannot be judged is passed over for its nearest untried neighbour, as `git bisect skip` does. `inward`:
    an end that cannot be judged gives way to its neighbour; otherwise it ends the search.
    """
    judged: dict[int, BisectVerdict] = {}

    def ask(index: int) -> Mark:
        if index not in judged:
            judged[index] = judge(index)
        return judged[index].mark

    def ended(good: int, bad: int, candidates: range | tuple[int, ...], problem: str = "") -> Search:
        return Search(good=good, bad=bad, candidates=tuple(candidates), judged=tuple(judged.items()), problem=problem)

    good = next((i for i in range(count if inward else 1) if ask(i) is not Mark.SKIP), -1)
    if good < 0:
        why = "no version can be judged" if inward else f"the good end cannot be judged: {judged[0].words}"
        return ended(-1, -1, (), why)
    if judged[good].mark is Mark.BAD:
        return ended(-1, good, (), "the first version that can be judged is bad already; begin with an older one")
    ends = range(good, count) if inward else range(count - 1, count)
    bad = next((i for i in reversed(ends) if ask(i) is not Mark.SKIP), -1)
    if bad < 0:
        return ended(good, -1, (), f"the bad end cannot be judged: {judged[count - 1].words}")
    if judged[bad].mark is Mark.GOOD:
        return ended(bad, -1, (), "the last version that can be judged is good: nothing to find")
    while True:
        untried = [i for i in range(good + 1, bad) if i not in judged]
        if not untried:
            return ended(good, bad, range(good + 1, bad + 1))
        middle = (good + bad) / 2
        index = min(untried, key=lambda i: (abs(i - middle), i))
        mark = ask(index)
        if mark is Mark.GOOD:
            good = index
        elif mark is Mark.BAD:
            bad = index
