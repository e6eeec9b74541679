"""A whole bisection: over saved traces, or over versions that a command records; and its result."""

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..errors import AnalysisError
from .criteria import ANY, REFERENCE, SQL, Criterion
from .log import BisectLog, VerdictCache
from .search import BisectVerdict, Mark, Search, decided, search, vote
from .trial import FOLDER_VARIABLE, TRACE_VARIABLE, VERSION_VARIABLE, Command, run_trial
from .versions import SavedVersion, keep_order

EXIT_FOUND: Final = 0
EXIT_NONE: Final = 1
EXIT_INCONCLUSIVE: Final = 125

Report = Callable[[str, BisectVerdict], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """A bisection's result. `reproduce` is the command that shows the fault again, "" if nothing was found. `runs` has what each
    run of a version was found to be, `again` says how to have more of them.
    """

    versions: tuple[str, ...]
    criterion: Criterion
    search: Search
    runs: Mapping[str, Sequence[BisectVerdict]]
    again: str
    reproduce: str = ""
    cached: int = 0

    @property
    def first_bad(self) -> str | None:
        """The version that brought the fault, where there is one answer."""
        found = self.search.candidates
        return self.versions[found[0]] if len(found) == 1 else None

    @property
    def candidates(self) -> list[str]:
        """The versions of which one is the first bad."""
        return [self.versions[index] for index in self.search.candidates]

    @property
    def evidence(self) -> BisectVerdict | None:
        """What was seen in the first version known to be bad."""
        return dict(self.search.judged).get(self.search.bad)

    @property
    def doubt(self) -> str:
        """Why the answer may be another one the next time; "" if nothing says so."""
        marks = {name: {run.mark for run in runs} for name, runs in self.runs.items()}
        mixed = next((name for name, found in marks.items() if found >= {Mark.GOOD, Mark.BAD}), None)
        if mixed is not None:
            return f"the fault shows now and then: {mixed} was bad in one run and good in another; {self.again}"
        if self.search.candidates and all(len(runs) < 2 for runs in self.runs.values()):
            return f"each version was judged by one run; a fault that shows now and then needs more: {self.again}"
        return ""

    @property
    def exit_code(self) -> int:
        """0: one version found. 125: several are left, or none could be judged. 1: the ends hold no first bad version."""
        if len(self.search.candidates) == 1:
            return EXIT_FOUND
        if self.search.candidates or self.search.judged[-1][1].mark is Mark.SKIP:
            return EXIT_INCONCLUSIVE
        return EXIT_NONE

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        evidence = self.evidence
        return {
            "exit_code": self.exit_code,
            "first_bad": self.first_bad,
            "candidates": self.candidates,
            "last_good": self.versions[self.search.good] if self.search.good >= 0 else None,
            "problem": self.search.problem,
            "doubt": self.doubt,
            "criterion": self.criterion.words(),
            "evidence": evidence.to_json() if evidence is not None else None,
            "reproduce": self.reproduce,
            "versions": list(self.versions),
            "judged": [{"version": self.versions[i], **verdict.to_json()} for i, verdict in self.search.judged],
            "cached": self.cached,
        }


def bisect_saved(
    versions: Sequence[SavedVersion], criterion: Criterion, cache: VerdictCache, *, rule: str, report: Report
) -> Bisection:
    """Bisect over saved traces; several runs of one version vote."""
    judged: dict[str, list[BisectVerdict]] = {}

    def judge(index: int) -> BisectVerdict:
        version = versions[index]
        found = judged[version.name] = []
        for left, run in zip(reversed(range(len(version.runs))), version.runs, strict=True):
            found.append(cache.judge(run, criterion))
            if decided(found, rule, left):
                break
        verdict = vote(found, rule)
        report(version.name, verdict)
        return verdict

    criterion.check()
    done = search(len(versions), judge)
    reproduce = ""
    if done.bad >= 0:
        seen, runs = dict(done.judged)[done.bad].seen, versions[done.bad].runs
        trace = Path(str(seen.get("trace") or runs[0][0]))
        # What was replayed together shows the fault together: the sides of a pair, the segments of a recording.
        together = next((run for run in runs if len(run) > 1 and run[0].parent == trace.parent), None)
        reproduce = _look(criterion, trace, together[0].parent if together else trace)
    names = tuple(version.name for version in versions)
    again = "several traces of a version vote, by --vote any if one bad run is enough"
    result = Bisection(versions=names, criterion=criterion, search=done, runs=judged, again=again)
    return replace(result, reproduce=reproduce, cached=cache.hits)


def bisect_run(
    versions: Sequence[str],
    command: Command,
    criterion: Criterion,
    log: BisectLog,
    *,
    tries: int,
    rule: str,
    report: Report,
) -> Bisection:
    """Bisect over versions that a command records, up to `tries` times each, until the vote is decided."""
    resumed = 0
    judged: dict[str, list[BisectVerdict]] = {}
    if command.keep is not None:
        keep_order(command.keep, versions)

    def judge(index: int) -> BisectVerdict:
        nonlocal resumed
        version = versions[index]
        found = judged[version] = log.trials(version)[:tries]
        resumed += len(found)
        while len(found) < tries and not decided(found, rule, tries - len(found)):
            begin = time.monotonic()
            found.append(run_trial(command, version, len(found) + 1, criterion))
            log.note(version, found[-1], time.monotonic() - begin)
        verdict = vote(found, rule)
        report(version, verdict)
        return verdict

    criterion.check()
    done = search(len(versions), judge, inward=False)
    reproduce = ""
    if done.bad >= 0:
        version, trace = versions[done.bad], Path(str(dict(done.judged)[done.bad].seen.get("trace", "")))
        reproduce = _record_again(command, version, criterion)
        if command.keep is not None and command.keep in trace.parents:  # a run that is gone on with may have kept none
            several = len(list(trace.parent.glob("*.arrow"))) > 1
            reproduce = _look(criterion, trace, trace.parent if several else trace)
    again = f"--tries {max(3, 2 * tries)} --vote any adds runs to those of the log"
    result = Bisection(versions=tuple(versions), criterion=criterion, search=done, runs=judged, again=again)
    return replace(result, reproduce=reproduce, cached=resumed)


def _look(criterion: Criterion, trace: Path, replayed: Path) -> str:
    """Return the command that shows the fault in a trace; `replayed` is the trace, or its folder."""
    if criterion.kind == REFERENCE:
        compared = trace if trace.is_file() else trace.parent  # segments go by a name that is no file's
        return f"{_diff(criterion)} {shlex.quote(str(compared))}"
    replay = shlex.join(["kvcanary-replay", str(replayed)])
    if criterion.kind == SQL:  # asked of the report, which that replay writes beside the trace
        return f"{replay}; {shlex.join(['kvcanary', 'sql', str(trace.with_suffix('.report')), criterion.value])}"
    return replay


def _record_again(command: Command, version: str, criterion: Criterion) -> str:
    words = shlex.join(command.filled(version, Path()))
    look = "kvcanary-replay *.arrow"
    if criterion.kind == REFERENCE:
        look = f'for trace in *.arrow; do {_diff(criterion)} "$trace"; done'
    elif criterion.kind == SQL:
        look = f"{{ {look}; kvcanary sql *.report {shlex.quote(criterion.value)}; }}"
    settings = f"{VERSION_VARIABLE}={shlex.quote(version)} {FOLDER_VARIABLE}=. {TRACE_VARIABLE}=trace.arrow"
    if command.environments is not None:
        settings += f' PATH={shlex.quote(str(command.environments.path(version) / "bin"))}:"$PATH"'
    return f"{settings} {words} && {look}"


def _diff(criterion: Criterion) -> str:
    """Return the command that compares with the reference, but for the other trace."""
    words = [] if criterion.kv else ["--no-kv"]
    if criterion.kv and criterion.kv_tolerance is not None:
        words = ["--kv-tolerance", str(criterion.kv_tolerance)]
    return shlex.join(["kvcanary", "diff", *words, criterion.value])


def make_criterion(asked: Mapping[str, str], *, kv: bool, kv_tolerance: float | None) -> Criterion:
    """Return what the four options of `asked` say, "" if not given; raise `AnalysisError` for two, or for what there is not."""
    chosen = {kind: value for kind, value in asked.items() if value}
    if len(chosen) > 1:
        raise AnalysisError(f"{' and '.join(f'--{kind}' for kind in chosen)} exclude one another")
    if (not kv or kv_tolerance is not None) and REFERENCE not in chosen:
        raise AnalysisError("--no-kv and --kv-tolerance say how a --reference is compared; name one")
    if not kv and kv_tolerance is not None:
        raise AnalysisError("--no-kv and --kv-tolerance exclude one another")
    if kv_tolerance is not None and not math.isfinite(kv_tolerance):
        raise AnalysisError(f"--kv-tolerance is {kv_tolerance}, expected a number; --no-kv leaves KV bytes out")
    kind, value = next(iter(chosen.items()), (ANY, ""))
    return Criterion(kind=kind, value=value, kv=kv, kv_tolerance=kv_tolerance)
