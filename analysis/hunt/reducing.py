"""The fewest and shortest requests that still bring an incident: delta debugging in which each trial is a run of the engine."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from ..shrink.proof import show
from ..shrink.search import leave_out
from ..shrink.shrink import NothingToShrinkError
from .coverage import Coverage
from .run import EngineError, Plan, RecordedRun
from .workload import Step, shape

_ONE_RUN_S: Final = 3600.0
_SHORTER: Final = ("prompt", "max_tokens")


@dataclass(slots=True, kw_only=True)
class Reduction:
    """The smallest workload so far; `reduce` makes it smaller. Trials run in `folder`, where the recording of the smallest
    stays, as `kept`; `trace` is the one of its recordings that shows the incident.

    A workload shows the incident if one of `repeat` runs of it has an incident of the same kind; a smaller one has to show it
    twice so, once may be luck. Of as many runs of the smallest at the end, `shown` have it; one that has it in none is given up
    for the one before. `told` is called before each run.
    """

    plan: Plan
    steps: list[Step]
    folder: Path
    repeat: int = 1
    told: Callable[["Reduction"], None] = lambda _: None
    wanted: dict[str, Any] = field(default_factory=dict)
    runs: int = 0
    shown: list[int] = field(default_factory=lambda: [0, 0])
    stopped: str = ""
    kept: Path | None = None
    trace: Path | None = None
    _until: float = 0.0
    _failed: bool = False
    _before: list[list[Step]] = field(default_factory=list)  # what was smallest once

    def reduce(self, incident: int, seconds: float) -> None:
        """Make the workload smaller until nothing more can go, or for `seconds` behind the first run, the last runs not counted, or up
        to Ctrl-C.

        Raises `NothingToShrinkError` if the whole workload does not show incident number `incident`, `EngineError` if the
        engine cannot be started, and `TraceError`.
        """
        self._until = time.monotonic() + _ONE_RUN_S * self.repeat
        if not self._shows(self.steps, incident):
            raise NothingToShrinkError(
                f"{self.runs} run(s) of the workload showed no incident {incident}; try more with --repeat"
            )
        self._until = time.monotonic() + seconds
        try:
            try:
                self._search()
            except TimeoutError:
                self.stopped = "the time was over"
            if self.repeat > 1:
                self._confirm()
        except EngineError as error:  # what was found before stands
            self.stopped = str(error)
        except KeyboardInterrupt:
            self.stopped = "interrupted"

    def _search(self) -> None:
        named = self.wanted["requests"]  # an engine's name of a request has the client's in it
        self._offer([step for step in self.steps if any(step.name and step.name in name for name in named)])
        leave_out(list(range(len(self.steps))), self._without(self.steps))
        for name in _SHORTER:
            self._shorten(name, range(len(self.steps)))
        for name in _SHORTER:
            for at in range(len(self.steps)):
                self._shorten(name, [at])
        self._offer([msgspec.structs.replace(step, at_ms=0, abort_after=-1, salt="") for step in self.steps])

    def _confirm(self) -> None:
        """Run the smallest as often again; go back to one before it for as long as that never shows the incident."""
        self._until = math.inf
        while True:
            shows = [self._run(self.steps, 0) for _ in range(self.repeat)]
            self.shown = [sum(shows), self.repeat]
            if any(shows) or not self._before:
                return
            self.steps = self._before.pop()

    def _without(self, whole: Sequence[Step]) -> Callable[[Sequence[int]], bool]:
        """Return what leaves steps out, which are named by their place in `whole`."""
        left = dict(enumerate(whole))

        def drop(places: Sequence[int]) -> bool:
            kept = {place: step for place, step in left.items() if place not in places}
            if not self._offer(list(kept.values())):
                return False
            left.clear()
            left.update(kept)
            return True

        return drop

    def _shorten(self, name: str, places: Sequence[int]) -> None:
        """Halve prompts, or answers, of some steps for as long as the incident shows."""
        while self._offer([_halved(step, name) if at in places else step for at, step in enumerate(self.steps)]):
            pass

    def _offer(self, steps: list[Step]) -> bool:
        """Take a smaller workload if it shows the incident."""
        if not shape(steps)["requests"] or steps == self.steps:
            return False
        if not all(self._shows(steps, 0) for _ in range(1 if self.repeat == 1 else 2)):
            return False
        self._before.append(self.steps)
        self.steps = steps
        return True

    def _shows(self, steps: list[Step], incident: int) -> bool:
        return any(self._run(steps, incident) for _ in range(self.repeat))

    def _run(self, steps: list[Step], incident: int) -> bool:
        """Run the engine once; say whether it shows an incident of the wanted kind, which the first run with one says."""
        if time.monotonic() > self._until:
            raise TimeoutError
        self.runs += 1
        self.told(self)
        place = self.folder / f"run-{self.runs:04}"
        shutil.rmtree(place, ignore_errors=True)  # of an earlier search
        try:
            found = self._incidents(steps, place)
            self._failed = False
        except EngineError:
            if self.repeat == 1 or self.runs == 1 or self._failed:
                raise
            found, self._failed = [], True  # now and then an engine fails, too; twice one after the other says more
        rows = [row for row, _ in found]
        if not self.wanted and 0 < incident <= len(rows):
            self.wanted = rows[incident - 1]
        showing = [path for row, path in found if row["kind"] == self.wanted.get("kind")]
        good = bool(showing)
        gone = self.kept if good else place
        if gone is not None:
            shutil.rmtree(gone, ignore_errors=True)
        if good:
            self.kept, self.trace = place, showing[0]
        return good

    def _incidents(self, steps: list[Step], place: Path) -> list[tuple[dict[str, Any], Path]]:
        """Run the engine once; return the incidents of its recordings, each with its trace."""
        with RecordedRun(self.plan, place, Coverage()) as run:
            if not self.plan.script:
                run.start()
            run.drive(steps, time.monotonic() + _ONE_RUN_S)
            run.end()
            if not run.forwards and (run.failed or self.runs == 1):
                why = "; ".join(run.why_nothing)
                raise EngineError(f"{place}: {run.failed or 'the engine recorded nothing'}; {why}")
            return [(row, paths[0]) for paths in run.corrupt for row in show(paths).incidents]


def _halved(step: Step, name: str) -> Step:
    if step.do != "ask":
        return step
    if name == "prompt":
        return msgspec.structs.replace(step, prompt=step.prompt[: max(1, len(step.prompt) // 2)])
    return msgspec.structs.replace(step, max_tokens=max(1, step.max_tokens // 2))
