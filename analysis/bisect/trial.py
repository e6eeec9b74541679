"""One trial of `kvcanary bisect run`: run the user's command for a version, and judge what it recorded."""

import os
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import AnalysisError
from .criteria import Criterion, judge_traces
from .environments import EnvironmentFailed, Environments, inside
from .process import run_command
from .search import BisectVerdict, Mark
from .versions import folder_name, git, one_each, read_order

VERSION_VARIABLE: Final = "KVCANARY_BISECT_VERSION"
TRACE_VARIABLE: Final = "KVCANARY_BISECT_TRACE"
FOLDER_VARIABLE: Final = "KVCANARY_TRACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The user's command, its words filled in for each trial; `keep` is where traces stay, None for nowhere;
    it runs in an environment of the version's own if there are `environments`.
    """

    words: tuple[str, ...]
    timeout_s: float | None = None
    keep: Path | None = None
    environments: Environments | None = None

    def filled(self, version: str, folder: Path) -> list[str]:
        """Return the words for a trial that records into `folder`."""
        values = {"{version}": version, "{trace}": str(folder / "trace.arrow"), "{out}": str(folder)}
        if self.environments is not None:
            values["{python}"] = str(self.environments.path(version) / "bin" / "python")
        words = list(self.words)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return words


def run_trial(command: Command, version: str, number: int, criterion: Criterion) -> BisectVerdict:
    """Run the command once, and judge every trace that it left in its folder; raise `AnalysisError` if it cannot be started."""
    with tempfile.TemporaryDirectory(prefix="kvcanary-bisect-") as temporary:
        folder = Path(temporary)
        if command.keep is not None:
            folder = command.keep / f"{folder_name(version)}-{number}"
            _make(folder)
        try:
            return _judged(command, version, folder, criterion)
        finally:
            if command.keep is not None:
                with suppress(OSError):  # it holds something
                    folder.rmdir()


def _judged(command: Command, version: str, folder: Path, criterion: Criterion) -> BisectVerdict:
    places = {VERSION_VARIABLE: version, TRACE_VARIABLE: str(folder / "trace.arrow"), FOLDER_VARIABLE: str(folder)}
    with ExitStack() as held:
        variables = dict(os.environ)
        if command.environments is not None:
            try:
                variables = inside(held.enter_context(command.environments.of(version)))
            except EnvironmentFailed as error:
                return BisectVerdict(mark=Mark.SKIP, words=str(error))
        try:
            problem, lines = run_command(command.filled(version, folder), {**variables, **places}, command.timeout_s)
        except ValueError:  # no program takes such a word
            raise AnalysisError(
                f"version {version!r}: its name holds a NUL byte, which no command can be given"
            ) from None
    if problem:
        return BisectVerdict(mark=Mark.SKIP, words=problem)
    verdict = judge_traces(sorted(folder.rglob("*.arrow")), criterion)
    said = [line for line in lines if "kvcanary: " in line]  # an adapter that does not know this version
    if verdict.mark is Mark.SKIP and said:
        return replace(verdict, words=f"{verdict.words}; {said[-1].strip()}")
    return verdict


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for trace in folder.rglob("*.arrow"):  # of an earlier bisection, which would be judged along
            trace.unlink()
    except OSError as error:
        raise AnalysisError(f"{folder}: cannot be made ({error.strerror or error}); name another with --keep") from None


def listed_versions(text: str | None, good: str, bad: str) -> list[str]:
    """Return the versions from `good` to `bad`, oldest first: joined by commas, a file's lines, or git's commits here."""
    if text is None:
        return [good, *_commits(good, bad)]
    if os.path.isfile(text):  # noqa: PTH113  # a list of many versions is too long a name for a Path to be asked
        names = read_order(Path(text))
    else:
        names = one_each([name.strip() for name in text.split(",") if name.strip()], "--versions")
    for option, name in (("--good", good), ("--bad", bad)):
        if name not in names:
            shown = ", ".join(names[:20]) + (f" and {len(names) - 20:,} more" if len(names) > 20 else "")
            alone = "; if that is a file, there is none of that name here" if len(names) == 1 else ""
            raise AnalysisError(f"{option} {name} is not among the versions: {shown}{alone}")
    first, last = names.index(good), names.index(bad)
    if first >= last:
        raise AnalysisError(f"--good {good} does not come before --bad {bad} in --versions: oldest first, please")
    return list(names[first : last + 1])


def _commits(good: str, bad: str) -> list[str]:
    named = "name the versions with --versions"
    try:
        commits = git("rev-list", "--reverse", "--first-parent", "--end-of-options", f"{good}..{bad}").split()
    except AnalysisError as error:
        raise AnalysisError(f"{error}; {named}, or run this in a git repository") from None
    if not commits:
        raise AnalysisError(f"git knows no commit after {good} up to {bad}")
    return commits
