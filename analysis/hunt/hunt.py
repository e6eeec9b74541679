"""Rounds of generated requests, recorded and judged, until an incident shows or the time is over."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...replayer.report.summary import combined_exit_code
from ..shrink.proof import show
from ..shrink.shrink import NothingToShrinkError, shrink
from .coverage import PATHS, Coverage
from .run import WORKLOAD_NAME, Plan, RecordedRun
from .workload import Limits, Step, make_round, shape

_TRIES: Final = 3  # rounds that aim at a path before it is taken for one that this engine does not have
_LONGEST: Final = 256
_EXIT_CODES: Final = {"corrupt": 1, "inconclusive": 125, "clean": 0}
INTERRUPTED: Final = "interrupted"
SHRUNK_TRACE: Final = "small.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuntResult:
    """What a hunt came to: `exit_code` 1 with an `incident`, 0 for nothing, 125 if nobody can say, and `doubts` say why.

    `workload` and `trace` show the incident; `shrunk_trace` is the smallest part of it, "" if there is none.
    """

    exit_code: int
    engine: str
    seed: int
    seconds: float
    rounds: int
    requests: dict[str, int]
    forwards: int
    reached: dict[str, int]
    incident: dict[str, Any] | None
    workload: str
    trace: str
    shrunk_trace: str
    doubts: list[str]


class Hunt:
    """A hunt into `folder`; `told` is called as it goes on. `workload` is done instead of generated rounds, once."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        seed: int,
        jitter_ms: int = 0,
        longest: int = 0,
        vocabulary: int = 500,
        without: frozenset[str] = frozenset(),
        adapters: Sequence[str] = (),
        fields: Sequence[Mapping[str, Any]] = (),
        workload: Sequence[Step] = (),
        told: Callable[["Hunt"], None] = lambda _: None,
    ) -> None:
        self._plan, self._folder, self._told = plan, folder, told
        self._workload, self._seed = list(workload), seed
        self._longest = longest
        self._limits = Limits(
            pool=4 * _LONGEST,
            longest=longest or _LONGEST,
            vocabulary=vocabulary,
            adapters=adapters,
            fields=fields,
            jitter_ms=jitter_ms,
            without=without | {"swap"} if plan.script else without,  # an engine's own endpoint
        )
        self.coverage = Coverage()
        self.counts: Counter[str] = Counter()
        self.rounds = self._forwards = 0
        self.aim = ""
        self.state = "starting the engine"
        self._tries: Counter[str] = Counter()
        self._engines: set[str] = set()
        self._doubts: dict[str, None] = {}
        self._verdicts: list[str] = []

    def run(self, seconds: float) -> HuntResult:
        """Hunt for `seconds`, counted from when the engine is ready; raise `EngineError`, and `TraceError`."""
        began, until, found = time.monotonic(), None, None
        folder = self._folder
        while found is None and (until is None or time.monotonic() < until):
            if self._plan.script:
                folder = self._folder / f"round-{self.rounds:04}"
            with RecordedRun(self._plan, folder, self.coverage) as run:
                try:
                    until = self._use(run, seconds, until)
                except KeyboardInterrupt:
                    self._doubts[INTERRUPTED] = None
                    until = 0.0
                self.state = "ending the engine, and judging the rest"
                self._told(self)
                run.end()
                self._learn(run)
                self._count(run)
                if not run.recordings or run.failed:
                    until = 0.0
                found = run if run.corrupt else None
            if self._workload:
                break
        return self._result(found, folder, time.monotonic() - began)

    def _use(self, run: RecordedRun, seconds: float, until: float | None) -> float:
        """Do rounds with one engine; of a script one. Return when to stop."""
        if not self._plan.script:
            self._told(self)
            run.start()
            self._longest = self._longest or run.longest
            self._limits = replace(
                self._limits,
                longest=min(self._longest or _LONGEST, _LONGEST),
                adapters=self._limits.adapters or run.adapters,
            )
        until = until or time.monotonic() + seconds
        while not (run.damaged or run.failed) and time.monotonic() < until:
            self.state = "asking"
            self._told(self)
            run.drive(self._workload or self._rounds(), math.inf if self._workload and self._plan.script else until)
            if self._plan.script or self._workload:
                break
            if not run.is_recorded():
                break
            self._learn(run)
        return until

    def _rounds(self) -> list[Step]:
        """Return the steps of the next round, or of some, of which a script does not start anew for each."""
        steps: list[Step] = []
        for _ in range(self._plan.rounds if self._plan.script else 1):
            self.aim = self._next_aim()
            steps += make_round(self._seed, self.rounds, self.aim, self._limits)
            self.rounds += 1
        return steps

    def _learn(self, run: RecordedRun) -> None:
        """Fit what is asked to the pool that the recording has."""
        for header in run.headers[:1]:
            self._engines.add(f"{header.engine.name} {header.engine.version}")
            group = header.groups[0]
            longest = min(self._longest or _LONGEST, max(8, group.num_slots * 3 // 4))
            self._limits = replace(self._limits, pool=group.num_slots, page=group.page_size, longest=longest)

    def _next_aim(self) -> str:
        """Return the path that was aimed at least of those not reached, then, now and then, the one reached least."""
        missing = [path for path in PATHS if not self.coverage.reached[path] and self._tries[path] < _TRIES]
        reached = [path for path in PATHS if self.coverage.reached[path]]
        aim = ""
        if missing:
            aim = min(missing, key=self._tries.__getitem__)
        elif reached and self.rounds % 3 == 0:
            aim = min(reached, key=self.coverage.reached.__getitem__)
        self._tries[aim] += 1
        return aim

    def _count(self, run: RecordedRun) -> None:
        self.counts += run.counts
        if self._plan.script:
            self.counts["given to the script"] += shape(run.steps)["requests"]
        self._forwards += run.forwards
        for _, facts in run.recordings.values():
            self._verdicts.append(facts["verdict"])
            self._doubts.update(dict.fromkeys(facts["doubts"]))
        for why in run.unreadable:
            self._doubts[why] = None
            self._verdicts.append("inconclusive")
        if run.failed:
            self._doubts[run.failed] = None
            self._verdicts.append("inconclusive")
        if run.refusal:
            self._doubts[f"refused: {run.refusal}"] = None
        if self._forwards and not self.coverage.has_history:
            self._doubts["no history of slots was recorded, without which evictions and aborts are not seen"] = None
        if not self._forwards and INTERRUPTED not in self._doubts:
            self._doubts.update(dict.fromkeys(run.why_nothing))

    def _result(self, found: RecordedRun | None, folder: Path, seconds: float) -> HuntResult:
        incident, trace, small = None, "", ""
        if found is not None:
            paths = found.corrupt[0]
            trace = str(paths[0])
            self.state = "making the trace smaller"
            self._told(self)
            target = self._folder / SHRUNK_TRACE
            try:
                incident, small = shrink(paths, target, seconds=60).incident, str(target)
            except NothingToShrinkError as error:
                self._doubts[str(error)] = None
                incident = next(iter(show(paths).incidents), None)
        codes = [_EXIT_CODES[verdict] for verdict in self._verdicts] if self._forwards else [125]
        return HuntResult(
            exit_code=1 if found is not None else combined_exit_code(codes or [125]),
            engine=", ".join(sorted(self._engines)),
            seed=self._seed,
            seconds=round(seconds, 1),
            rounds=self.rounds,
            requests=dict(self.counts),
            forwards=self._forwards,
            reached={path: self.coverage.reached[path] for path in PATHS},
            incident=incident,
            workload=str(folder / WORKLOAD_NAME),
            trace=trace,
            shrunk_trace=small,
            doubts=list(self._doubts),
        )
