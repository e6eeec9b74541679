"""The search itself: over versions 0 .. n - 1, of which the first is good and the last bad."""

from collections.abc import Callable
from dataclasses import dataclass

from .outcome import Judgement, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Where a search ended.

    `good` and `bad` are the last version known to be good and the first known to be bad; -1 where there is none.
    `candidates` are those of which one is the first bad: one, or several where others could not be judged. `judged` holds
    every judgement in the order in which it was made. `problem` says why there is no answer.
    """

    good: int
    bad: int
    candidates: tuple[int, ...]
    judged: tuple[tuple[int, Judgement], ...]
    problem: str = ""


def search(count: int, judge: Callable[[int], Judgement], *, inward: bool = True) -> Search:
    """Verify both ends, then halve.

    A version that cannot be judged is passed over for its nearest untried neighbour, as `git bisect skip` does.

    Args:
        count: how many versions.
        judge: called at most once for each.
        inward: whether an end that cannot be judged gives way to its neighbour; otherwise it ends the search.
    """
    judged: dict[int, Judgement] = {}

    def ask(index: int) -> Outcome:
        if index not in judged:
            judged[index] = judge(index)
        return judged[index].outcome

    def ended(good: int, bad: int, candidates: range | tuple[int, ...], problem: str = "") -> Search:
        return Search(good=good, bad=bad, candidates=tuple(candidates), judged=tuple(judged.items()), problem=problem)

    ends = range(count) if inward else range(1)
    good = next((i for i in ends if ask(i) is not Outcome.SKIP), -1)
    if good < 0 and not inward:
        return ended(-1, -1, (), f"the good end cannot be judged: {judged[0].words}")
    if good < 0:
        return ended(-1, -1, (), "no version can be judged")
    if judged[good].outcome is Outcome.BAD:
        return ended(-1, good, (), "the first version that can be judged is bad already; begin with an older one")
    ends = range(good, count) if inward else range(count - 1, count)
    bad = next((i for i in reversed(ends) if ask(i) is not Outcome.SKIP), -1)
    if bad < 0:
        return ended(good, -1, (), f"the bad end cannot be judged: {judged[count - 1].words}")
    if judged[bad].outcome is Outcome.GOOD:
        return ended(bad, -1, (), "the last version that can be judged is good: nothing to find")
    while True:
        untried = [i for i in range(good + 1, bad) if i not in judged]
        if not untried:
            return ended(good, bad, range(good + 1, bad + 1))
        middle = (good + bad) / 2
        index = min(untried, key=lambda i: (abs(i - middle), i))
        outcome = ask(index)
        if outcome is Outcome.GOOD:
            good = index
        elif outcome is Outcome.BAD:
            bad = index
