"""Do the tests notice? `python -m tests.mutants.run`: change the code in one place at a time, and run its tests.

Each mutant is one changed place of the files that `tests/mutants/tests.toml` names; the tests that reach it must fail.
What survives is printed, and with `--write` listed in docs/results/mutants.md, with the reason from
`tests/mutants/explained.toml` why it is no hole. All of them take a night; `--sample N` takes N at random, the same for the
same `--seed`. Results are kept in build/mutants for as long as the code stays as it is: a second run goes on from them, and
tries again what survived.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from .mutations import Mutant, mutants

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build" / "mutants"
PAGE: Final = ROOT / "docs" / "results" / "mutants.md"
EXPLAINED: Final = Path(__file__).with_name("explained.toml")
CHOICE: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("tests.toml").read_text(encoding="utf-8"))
# Loops run as they stand, slowly: fewer random cases, and none twice.
PYTEST: Final = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:faulthandler",
    "-p",
    "tests.mutants.trials",
    "-o",
    "timeout=0",
    "--rootdir=.",
    "--conformance-cases",
    "10",
]
LIMITS: Final = (
    "What this does not say: loops run as plain Python, so that what only compiled code does - numbers that wrap around, reads"
    " outside an array - is not looked at, nor are the GPU's kernels; a mutant that survives may be noticed by a test that comes"
    " later than the seconds above; one noticed by an error rather than by a wrong answer counts as noticed; a small sample"
    " bounds the share of holes loosely: none in 30 leaves up to 10 %, with 95 % confidence."
)
LEFT_OUT: Final = " and ".join(f"not {name}" for name in CHOICE["left_out"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="try so many, at random (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="mutants whose name, 'file::function: change', contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=120, help="processor time of tests for one mutant, at most")
    parser.add_argument("--quick", action="store_true", help="without the tests that replay whole traces")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    files = [path for path in listed if any(fnmatch(path, pattern) for pattern in CHOICE["files"])]
    every = [mutant for path in files for mutant in mutants(path, (ROOT / path).read_text(encoding="utf-8"))]
    named = [mutant for mutant in every if options.only in mutant.name]
    if not named:
        raise SystemExit(f"no mutant's name contains {options.only!r}; tests/mutants/tests.toml lists the files")
    chosen = random.Random(options.seed).sample(named, min(options.sample or len(named), len(named)))
    place = BUILD / digest([path for path in listed if not path.startswith("tests/")])
    place.mkdir(parents=True, exist_ok=True)
    done = results(place)
    left = [mutant for mutant in chosen if done.get(mutant.name, {}).get("outcome") not in ("killed", "timeout")]
    print(f"{len(chosen)} of {len(every)} mutants, {len(left)} of them to try; results in {place}", flush=True)
    copy_tree(place / "tree")
    (place / "files").write_text("\n".join(files), encoding="utf-8")
    require(place, {"map": start(place, "map", [], options)})  # which test reaches what: once, for all jobs
    jobs = {str(number): left[number :: options.jobs] for number in range(options.jobs)}
    require(place, {name: start(place, name, job, options) for name, job in jobs.items() if job})
    tried = results(place)
    untried = [mutant.name for mutant in chosen if mutant.name not in tried]
    if untried:
        raise SystemExit(f"{len(untried)} mutants have no result, the first: {untried[0]}")
    text = page(chosen, tried, len(every), options)
    print(text)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")


def require(place: Path, started: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait for runs of the tests; where one ended too early, no result is shown."""
    ended = [name for name, code in {name: process.wait() for name, process in started.items()}.items() if code]
    for name in ended:
        print(*(place / f"{name}.log").read_text(encoding="utf-8").splitlines()[-30:], sep="\n", file=sys.stderr)
    if ended:
        raise SystemExit(f"a run of the tests ended too early; all that it said: {place / ended[0]}.log")


def digest(paths: Sequence[str]) -> str:
    """Return a name for the code as it is."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.encode() + b"\0" + (ROOT / path).read_bytes())
    return whole.hexdigest()[:16]


def results(place: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each mutant that was tried."""
    lines = [line for file in sorted(place.glob("results-*.jsonl")) for line in file.read_text().splitlines()]
    found: dict[str, dict[str, Any]] = {}
    for one in map(json.loads, lines):
        if found.get(one["name"], {}).get("outcome") not in ("killed", "timeout"):
            found[one["name"]] = one
    return found


def copy_tree(tree: Path) -> None:
    """Copy what git knows of the working tree, as a package that is found before the installed one."""
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / ".typing").mkdir(exist_ok=True)
    (tree / ".typing" / "kvcanary").symlink_to(tree)


def start(place: Path, name: str, job: Sequence[Mutant], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start the run of some mutants."""
    asked = place / f"mutants-{name}.jsonl"
    asked.write_text("\n".join(json.dumps(asdict(mutant)) for mutant in job), encoding="utf-8")
    own = {
        "--mutants": asked,
        "--mutant-files": place / "files",
        "--mutant-results": place / f"results-{name}.jsonl",
        "--mutant-map": place / "reached.jsonl",
        "--mutant-seconds": options.seconds,
        "--basetemp": place / f"tmp-{name}",
    }
    arguments = [f"{name}={value}" for name, value in own.items()]
    tests = CHOICE["tests"] + ([] if options.quick else CHOICE["whole"])
    with (place / f"{name}.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *PYTEST, "-k", LEFT_OUT, *arguments, *tests],
            cwd=place / "tree",
            env=os.environ | {"PYTHONPATH": f"{place / 'tree' / '.typing'}{os.pathsep}{place / 'tree'}"},
            stdout=log,
            stderr=log,
        )


def page(chosen: Sequence[Mutant], tried: dict[str, dict[str, Any]], total: int, options: argparse.Namespace) -> str:
    """Return the page of results."""
    explained: dict[str, str] = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("survivors", {})
    survivors = sorted(
        (mutant for mutant in chosen if tried[mutant.name]["outcome"] in ("survived", "unreached")),
        key=lambda mutant: (mutant.path, mutant.line),
    )
    open_ones = [mutant for mutant in survivors if mutant.name not in explained]
    missing = "**no quick test does**" if options.quick else "**a test is missing**"
    rows = [
        f"| `{mutant.path}` | `{mutant.function}` | `{mutant.change.replace('|', chr(92) + '|')}` | "
        f"{explained.get(mutant.name, missing)} |"
        for mutant in survivors
    ]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    command = f"python -m tests.mutants.run --seed {options.seed}" + (
        f" --sample {options.sample}" if options.sample else ""
    )
    command += " --quick" if options.quick else ""
    loops = sum(tried[mutant.name]["outcome"] == "timeout" for mutant in chosen)
    return "\n".join(
        [
            "# Mutants: do the tests notice?",
            "",
            (
                f"Made by `{command} --write` on {date.today()}, commit {commit}, Python {platform.python_version()}. Each"
                " mutant is one changed place (a boundary, an operator, a constant, a condition) of the files in"
                " `tests/mutants/tests.toml`: the loops of `kernels/` and `recorder/state`, run as they stand. The tests that"
                f" reach it, up to {options.seconds:.0f} s of them, must fail"
                f"{'; those that replay whole traces were left out' if options.quick else ''}."
            ),
            "",
            (
                f"{len(chosen)} of {total} mutants tried: {len(chosen) - len(survivors)} noticed ({loops} of them as loops without"
                f" end), {len(survivors)} survived, {len(open_ones)} of them unexplained"
                f" ({100 * len(open_ones) / max(1, len(chosen)):.1f} %)."
            ),
            "",
            LIMITS,
            "",
            *(["| file | function | change | why no test notices |", "|---|---|---|---|", *rows, ""] if rows else []),
        ]
    )


if __name__ == "__main__":
    main()
