"""Do the tests notice? `python -m tests.mutants.run`: change the code in one place at a time, and run its tests.

Each mutant is one changed place of `kernels/` or `recorder/state` in a copy of the tree, whose own tests must then fail.
What survives is printed, and with `--write` listed in docs/results/mutants.md, where `tests/mutants/explained.toml` says
why a survivor is no hole. All of them take a night; `--sample N` takes N at random, the same for the same `--seed`.
"""

import argparse
import os
import platform
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Final

from .mutations import Mutant, mutants

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "results" / "mutants.md"
EXPLAINED: Final = Path(__file__).with_name("explained.toml")
# Which tests speak for which files; the first pattern that matches.
TESTS: Final[Sequence[tuple[str, str]]] = tuple(
    tomllib.loads(Path(__file__).with_name("tests.toml").read_text(encoding="utf-8"))["tests"].items()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A mutant, and what became of it: "killed", "survived" or "timeout" (which counts as killed: it loops)."""

    mutant: Mutant
    outcome: str

    @property
    def name(self) -> str:
        """The mutant's name in `explained.toml`."""
        return f"{self.mutant.path}: {self.mutant.change}"


def tests_of(path: str) -> str | None:
    """Return the arguments of pytest for a file, None for one that is not mutated."""
    return next((tests for pattern, tests in TESTS if fnmatch(path, pattern)), None)


def copy_tree(place: Path) -> None:
    """Copy what git knows of the working tree, as a package that is found before the installed one."""
    shutil.rmtree(place, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target)
    (place / ".typing").mkdir(exist_ok=True)
    (place / ".typing" / "kvcanary").symlink_to(place)


def environment(place: Path) -> dict[str, str]:
    """Return the variables under which a tree's tests run: its own package, and no compiled code of another."""
    return os.environ | {
        "PYTHONPATH": str(place / ".typing"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(place / "build" / "numba"),
    }


def passes(place: Path, tests: str, timeout_s: float) -> str:
    """Run a tree's tests: "survived" if they pass, else "killed" or "timeout"."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests.split()]
    with subprocess.Popen(
        command,
        cwd=place,
        env=environment(place),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "timeout"
    if code not in (0, 1, 2):
        raise SystemExit(f"pytest ended with {code} in {place}: {' '.join(command)}")
    return "survived" if code == 0 else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="try so many, at random (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    files = [path for path in listed if options.only in path and tests_of(path)]
    every = [mutant for path in files for mutant in mutants(path, (ROOT / path).read_text(encoding="utf-8"))]
    if not every:
        raise SystemExit(
            f"nothing to mutate in files that contain {options.only!r}; tests/mutants/tests.toml lists them"
        )
    chosen = random.Random(options.seed).sample(every, min(options.sample or len(every), len(every)))
    places = [ROOT / "build" / "mutants" / str(number) for number in range(options.jobs)]
    for place in places:
        copy_tree(place)
    for tests in sorted({tests for path in files if (tests := tests_of(path))}):
        if passes(places[0], tests, options.timeout_s) != "survived":
            raise SystemExit(f"these tests fail without any mutant: {tests}")
    numbers = count(1)

    def try_all(place: Path, own: Sequence[Mutant]) -> list[Tried]:
        tried = []
        for mutant in own:
            file = place / mutant.path
            kept = file.read_bytes()
            file.write_text(mutant.source, encoding="utf-8")
            tried.append(Tried(mutant=mutant, outcome=passes(place, tests_of(mutant.path) or "", options.timeout_s)))
            file.write_bytes(kept)
            print(
                f"[{next(numbers)}/{len(chosen)}] {tried[-1].outcome}  {mutant.path}:{mutant.line}  {mutant.change}",
                flush=True,
            )
        return tried

    with ThreadPoolExecutor(options.jobs) as threads:
        shares = [chosen[number :: options.jobs] for number in range(options.jobs)]
        done = [tried for share in threads.map(try_all, places, shares) for tried in share]
    text = page(done, len(every), options)
    print(text)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")


def page(done: Sequence[Tried], total: int, options: argparse.Namespace) -> str:
    """Return the page of results."""
    explained: dict[str, str] = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("survivors", {})
    survivors = sorted((tried for tried in done if tried.outcome == "survived"), key=lambda tried: tried.name)
    open_ones = [tried for tried in survivors if tried.name not in explained]
    rows = [
        f"| `{tried.mutant.path}:{tried.mutant.line}` | `{tried.mutant.change.replace('|', chr(92) + '|')}` | "
        f"{explained.get(tried.name, '**a test is missing**')} |"
        for tried in survivors
    ]
    command = f"python -m tests.mutants.run --seed {options.seed}" + (
        f" --sample {options.sample}" if options.sample else ""
    )
    return "\n".join(
        [
            "# Mutants: do the tests notice?",
            "",
            (
                f"Made by `{command} --write` on {date.today()}, Python {platform.python_version()}. Each mutant is one changed"
                " place (a boundary, an operator, a constant, a condition) in `kernels/` or `recorder/state`; the tests of that file"
                " must fail."
            ),
            "",
            (
                f"{len(done)} of {total} mutants tried: {len(done) - len(survivors)} noticed, {len(survivors)} survived,"
                f" {len(open_ones)} of them unexplained ({100 * len(open_ones) / max(1, len(done)):.1f} %)."
            ),
            "",
            *(["| place | change | why no test notices |", "|---|---|---|", *rows, ""] if rows else []),
        ]
    )


if __name__ == "__main__":
    main()
