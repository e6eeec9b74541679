"""What the hooks around an engine's functions cost its thread, step by step.

numpy is imported when the sum is made: a process that records nothing imports this too.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

KINDS_KEPT: Final = 16
ENTRIES_KEPT: Final = 500_000  # of eight bytes; a step has some seven
PLACES: Final = 16
OTHERS: Final = 14  # the place of all other hooks
BEGINS: Final = 15  # no hook's: a step begins


class StepCost:
    """How long the hooks kept the engine's thread, engine step by engine step; only the latest steps are kept.

    One list holds everything in the order in which it was spent, so that little is touched in a step: `spent` takes
    nanoseconds times `PLACES`, plus the place that the hook has been given. `apart` are the names of at most 7 hooks whose
    time is also counted for itself.
    """

    def __init__(self, apart: Sequence[str] = ()) -> None:
        self._apart = tuple(apart)
        self.log = array("q")
        self.spent: Callable[[int], None] = self.log.append
        self._kinds: dict[tuple[str, int], int] = {}
        self._mode: Any = None
        self._rows = -1
        self._begins = 0  # the entry with which a step of this kind begins

    def places(self, hook: str) -> tuple[int, int]:
        """Return the places of what a hook takes before and after the engine's function."""
        at = 2 * self._apart.index(hook) if hook in self._apart else OTHERS
        return at, min(at + 1, OTHERS)

    def next_step(self, mode: Any, rows: int) -> None:
        """Begin another step, a forward of `mode`, an enum, with `rows` requests.

        What was spent before the first one was the start-up.
        """
        if mode is not self._mode or rows != self._rows:
            self._mode, self._rows = mode, rows
            kind = self._kinds.setdefault((getattr(mode, "name", str(mode)), rows), len(self._kinds))
            self._begins = kind * PLACES + BEGINS
        if len(self.log) > 2 * ENTRIES_KEPT:
            del self.log[:-ENTRIES_KEPT]
        self.spent(self._begins)

    def forget(self) -> None:
        """Keep nothing of what was spent so far: no step is counted, since nothing is recorded."""
        del self.log[:]

    def summary(self) -> dict[str, Any]:
        """Return steps, and the nanoseconds of engine thread that the median and the slowest hundredth of them took.

        `by_forward` has the same of the most frequent kinds of forwards, by mode and number of requests. `by_hook` has,
        of the same kinds, the median of each hook in `apart`, before and after the engine's function, and of all
        others together. The step that has not ended is left out.
        """
        import numpy as np

        log = self.log[:]  # the engine's thread may go on, and cannot append to what numpy is reading
        values, places = np.divmod(np.array(log, np.int64), PLACES)
        begins = np.flatnonzero(places == BEGINS)
        if len(begins) < 2:
            return {"steps": 0}
        kinds = values[begins[:-1]]
        step = np.cumsum(places == BEGINS) - 1
        counts = (places != BEGINS) & (step >= 0) & (step < len(kinds))
        times = np.zeros((len(kinds), BEGINS), np.int64)
        np.add.at(times, (step[counts], places[counts]), values[counts])

        def place(mine: Any, percent: int) -> int:
            return int(np.sort(mine)[len(mine) * percent // 100])

        whole = times.sum(axis=1)
        names = [f"{hook} {side}" for hook in self._apart for side in ("before", "after")]
        columns = {name: at for at, name in enumerate(names)} | {"others": OTHERS}
        by_forward: dict[str, list[int]] = {}
        by_hook: dict[str, dict[str, int]] = {}
        for (mode, rows), number in sorted(self._kinds.items(), key=lambda kind: -int((kinds == kind[1]).sum())):
            mine = kinds == number
            if mine.any() and len(by_forward) < KINDS_KEPT:
                by_forward[f"{mode} {rows}"] = [int(mine.sum()), place(whole[mine], 50), place(whole[mine], 99)]
                by_hook[f"{mode} {rows}"] = {name: place(times[mine, at], 50) for name, at in columns.items()}
        slowest = {f"engine_thread_ns_p{percent}": place(whole, percent) for percent in (50, 99)}
        return {"steps": len(kinds), **slowest, "by_forward": by_forward, "by_hook": by_hook}
