"""Records public bugs on the engines that they are made anew on, replays what is saved, and writes what came of it.

    python tests/corpus/run.py                          # everything: engines, replays, docs/results/real-bugs.md
    python tests/corpus/run.py --only short_hash        # engines only for bugs whose name contains this
    python tests/corpus/run.py --only X --record        # no replay: for who plants bugs and must not see what is said of them
    python tests/corpus/run.py --replay                 # no engine: the traces in data/corpus, and the page
    python tests/corpus/run.py --into FOLDER            # record it all anew there; data/corpus and the page stay
    python tests/corpus/run.py --round 26               # what is saved of a round that was held out, as first try if it has none

Each bug is a patch of the running engine (planted/vllm, planted/sglang ...) that leaves a mark before
the first forward that reads the damage; the replay does not look at marks. Each setup runs without a bug, too.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from bugs import BUGS, H200, Bug, link, load  # noqa: E402
from rounds import ROUND_NOTES, SWITCHES  # noqa: E402

load()

DATA = ROOT / "data" / "corpus"
ANSWERS = "answers.json"  # by trace: whether the bug changed what was answered
# By trace: what the rules said before they were mended, and the kinds of whoever planted it, where others were found right since.
FIRST_TRY = DATA / "held-out.json"
PAGE = ROOT / "docs" / "results" / "real-bugs.md"
PYTHON = {
    "vllm": ".venv-vllm",
    "sglang": ".venv-sglang",
    "transformers": ".venv",
    "nano": ".venv",
    "minisgl": ".venv-vllm",
    "gllm": ".venv",
    "lightllm": ".venv",
    "lmdeploy": ".venv",
    "swiftllm": ".venv",
}
# Engines that are no packages: which variable names their clone, and of what.
CLONES = {
    "nano": ("NANO_VLLM", "github.com/GeeeekExplorer/nano-vllm"),
    "minisgl": ("MINI_SGLANG", "github.com/sgl-project/mini-sglang"),
    "gllm": ("GLLM", "github.com/gty111/gLLM"),
    "lightllm": ("LIGHTLLM", "github.com/ModelTC/LightLLM"),
    "lmdeploy": ("LMDEPLOY", "github.com/InternLM/lmdeploy"),
    "swiftllm": ("SWIFTLLM", "github.com/interestingLSY/swiftLLM"),
}
AT_ONCE = 5  # runs a process, which imports the engine once
HIGH = 0.9  # nine of ten that are said with this should be right
CERTAIN = 0.7  # no wrong kind may be said with this
FIRST_WALKED = 20  # of the rounds by which it is measured what the rounds before one teach


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a replay made of a saved trace: `reads` is the first forward that reads the damage, -1 if none does.

    `unknown` is kind, branch and score with the rules of all its right kinds left out: what a mistake gets that no rule knows.
    """

    bug: Bug
    reads: int
    found: int
    seen_by: str
    kind: str
    branch: str
    score: float
    incidents: int
    sentence: str
    unknown: tuple[str, str, float]

    @property
    def effective(self) -> bool:
        """Whether the bug did what it does in this run, in what the adapter records."""
        return self.reads >= 0 and self.bug.recorded

    @property
    def right(self) -> bool:
        """Whether the first incident's kind is the bug's."""
        return self.kind in self.bug.kinds


def look(trace: Path, kinds: tuple[str, ...] = (), known: Any = None) -> tuple[int, Any, Any, Any]:
    """Replay a trace; return the first forward that reads the damage, the summary, and the incidents, with and without rules and
    bugs of `kinds`. It is compared with `known` bugs, None for four fifths of them, without itself.
    """
    from kvcanary.analysis.incidents.finding import gathered, incidents_of
    from kvcanary.analysis.incidents.places import read_places
    from kvcanary.replayer.run.replay import ReplaySettings, replay
    from learning import others

    with tempfile.TemporaryDirectory() as folder:
        summary = replay(trace, settings=ReplaySettings(), report=Path(folder))
        places = read_places(Path(folder))
        facts = gathered([trace], places)
        known = others(trace.stem) if known is None else known
        found, unknown = (
            incidents_of(Path(folder), places, facts, without, known.without(without)) for without in ((), kinds)
        )
    marks = [mark["labels"]["forward"] for mark in summary.marks if set(mark["labels"]) == {"forward"}]
    return (marks[0] if marks else -1), summary, found, unknown


def outcome(bug: Bug, data: Path = DATA, known: Any = None) -> Outcome:
    """Replay a bug's saved trace, and compare it with `known` bugs, None for four fifths of them, without itself."""
    reads, _, found, unknown = look(data / f"{bug.trace}.arrow", bug.kinds, known)
    reads, rows, others = max(reads, bug.reads), found.rows, unknown.rows
    first = rows[0] if rows else defaultdict(str, first_forward=-1, score=0.0, seen_by=[""])
    return Outcome(
        bug=bug,
        reads=reads,
        found=int(first["first_forward"]),
        seen_by=first["seen_by"][0],
        kind=first["kind"],
        branch=first["branch"],
        score=float(first["score"]),
        incidents=len(rows),
        sentence=first["sentence"],
        unknown=(others[0]["kind"], others[0]["branch"], float(others[0]["score"])) if others else ("", "", 0.0),
    )


def record(bugs: list[Bug], data: Path) -> None:
    """Run the engines with and without each bug; keep the traces in `data`, and whether the answers differ."""
    answers = json.loads((data / ANSWERS).read_text()) if (data / ANSWERS).exists() else {}
    for engine, folder in PYTHON.items():
        mine = [bug for bug in bugs if bug.engine == engine and bug.setup != H200]
        variable, clone = CLONES.get(engine, ("", ""))
        if variable and mine and variable not in os.environ:
            print(f"{engine} was left out: {variable} does not name a clone of {clone}")
            continue
        names = [bug.trace for bug in mine] + [f"clean:{setup}" for setup in sorted({bug.setup for bug in mine})]
        with tempfile.TemporaryDirectory() as place:
            for first in range(0, len(names), AT_ONCE):
                command = [str(ROOT / folder / "bin" / "python"), str(HERE / f"{engine}_engine.py"), place]
                # This tree's package and nothing else: an engine has libraries of its own.
                ours = os.pathsep.join(p for p in sys.path if (Path(p) / "kvcanary" / "recorder").is_dir())
                environment = {**os.environ, "PYTHONPATH": ours}
                subprocess.run([*command, *names[first : first + AT_ONCE]], check=True, env=environment, cwd=ROOT)
            for name in names:
                keep(Path(place) / name.replace(":", "-"), data / (name if ":" not in name else f"{engine}-{name}"))
            for bug in mine:  # an engine that gave no answers was changed, too
                said, right = (Path(place) / n / "tokens.json" for n in (bug.trace, f"clean-{bug.setup}"))
                answers[bug.trace] = not said.exists() or said.read_text() != right.read_text()
    (data / ANSWERS).write_text(json.dumps(dict(sorted(answers.items())), indent=1) + "\n")


def keep(run: Path, where: Path) -> None:
    """Keep a run's trace: the first, which is the only one of these engines."""
    traces = sorted((run / "traces").glob("*.arrow"))
    if not traces:
        raise SystemExit(f"{where.name}: no trace; {(run / 'log').read_text()[-2000:]}")
    target = where.with_name(f"{where.name.replace(':', '-')}.arrow")
    shutil.copyfile(traces[0], target)
    target.chmod(0o644)  # a trace is private to its owner; these are made to be read


def page(outcomes: list[Outcome]) -> str:
    """Return the text of docs/results/real-bugs.md."""
    from learning import FOLDS, reliability, walk

    answers = json.loads((DATA / ANSWERS).read_text())
    judged = [o for o in outcomes if o.effective]
    right = [o for o in judged if o.right]
    told = [o for o in judged if o.incidents]
    late = [o for o in judged if not 0 <= o.found <= o.reads]
    certain = [o for o in judged if o.score >= CERTAIN]
    sure = [o for o in certain if not o.right]
    mean = sum(o.incidents for o in judged) / max(1, len(judged))
    lines = [
        "# Real bugs",
        "",
        "Made by",
        "",
        "    python tests/corpus/run.py",
        "",
        (
            f"on {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}. Each bug is public, and made anew by a patch in our "
            "own words: on the engine that had it, or by its mechanism on one that runs here (engine in brackets). The patch "
            "marks the first forward that reads the damage; the replay does not look at marks. The traces are in `data/corpus/`, "
            "the patches in `tests/corpus/`; `make test` replays them. A bug has more than one right kind if what tells them "
            "apart is not recorded. The rules were written with these traces at hand, but for those that were held out: what "
            "was said of these at the first try, below, is what to expect of a bug that is not here. Known bugs are asked, too, "
            f"which look like one: of each bug four fifths of these, without itself ({FOLDS} parts)."
        ),
        "",
        f"- {len(outcomes)} bugs, {len(judged)} of them effective in what the adapter records, {sum(o.bug.held_out > 0 for o in judged)} of these held out",
        f"- found no later than in the forward that reads the damage first: **{len(judged) - len(late)} of {len(judged)}**",
        f"- right kind first: **{len(right)} of {len(judged)}** ({len(right) / max(1, len(judged)):.1%})",
        f"- said with {CERTAIN} or more: **{len(certain)}**, right **{sum(o.right for o in certain)}**",
        f"- right branch: {sum(o.branch == _branch(o.bug) for o in judged)}",
        f"- a wrong kind with a confidence of {CERTAIN} or more: **{len(sure)}**",
        f"- incidents a bug: **{mean:.2f}**",
        (
            f"- each as if nobody knew its kind, the rules of its right kinds left out: a kind (which is wrong then) with {CERTAIN} or "
            f"more: **{sum(o.unknown[2] >= CERTAIN for o in told)} of {len(told)}**; the right branch: **{sum(o.unknown[1] in _branches(o.bug) for o in told)}** "
            "(by what is observed alone, which was coded with these traces at hand)"
        ),
        "",
        "| bug | engine | answers | detector | forward | kind | confidence | incidents |",
        "| --- | --- | --- | --- | --- | --- | ---: | ---: |",
    ]
    for o in sorted(outcomes, key=lambda one: (one.bug.engine, one.bug.name)):
        bug = o.bug
        engine = bug.engine if bug.origin.lower() == bug.engine.lower() else f"{bug.origin} ({bug.engine})"
        kind = o.kind if o.right else f"{o.kind or 'nothing'}, not {bug.kinds[0]}"
        when = f"{o.found} of {o.reads}" if o.effective else "not effective" if bug.recorded else "not recorded"
        changed = {True: "changed", False: "the same"}.get(answers.get(bug.trace), "")
        named = f"[{bug.tracker}]({link(bug.tracker)}) {bug.name}"
        cells = (
            named,
            engine,
            changed,
            o.seen_by,
            when,
            kind if o.effective else "",
            f"{o.score:.2f}",
            str(o.incidents),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "forward: in which it was found, and which reads the damage first. Late are:", ""]
    lines += [f"- {o.bug.name}: {o.bug.late}." for o in late] + [""]
    lines += [*first_try([o for o in judged if o.bug.held_out]), "", "## What each does", ""]
    lines += [f"- **{o.bug.name}** ({o.bug.tracker}, {o.bug.engine}): {o.bug.mechanism}" for o in outcomes]
    lines += ["", "## SGLang's own switches", "", SWITCHES, "", "## Whether a confidence means what it says", ""]
    lines += [
        (
            f"Of bugs that were held out, from round {FIRST_WALKED} on: what is said of each by what the rounds before it taught, and "
            "by what the rules of its day said. Bugs of which nothing was found have no kind. Traits are those of today, some of "
            "which were coded with later rounds at hand (`python benchmarks/known_bugs.py --plain` leaves these out)."
        ),
        "",
        *reliability(walk(FIRST_WALKED)),
    ]
    return "\n".join(lines) + "\n"


def first_try(held_out: list[Outcome]) -> list[str]:
    """Return what the rules said of bugs that were recorded before any rule was run on them, before they were mended."""
    said = json.loads(FIRST_TRY.read_text())
    lines = [
        "## Held out, first try",
        "",
        "These were chosen, written and recorded, with their right kinds, before any rule was run on them. What the rules of that day said:",
    ]
    for number, (rules, note) in enumerate(ROUND_NOTES, 1):
        rows = [(o.bug, said[o.bug.trace]) for o in held_out if o.bug.held_out == number and o.bug.trace in said]
        kinds = [tuple(row.get("kinds", bug.kinds)) for bug, row in rows]
        is_right = [row["kind"] in mine for (_, row), mine in zip(rows, kinds, strict=True)]
        right = sum(is_right)
        sure = sum(not good and row["score"] >= CERTAIN for good, (_, row) in zip(is_right, rows, strict=True))
        late = sum(not 0 <= row["found"] <= row["reads"] for _, row in rows)
        mean = sum(row["incidents"] for _, row in rows) / max(1, len(rows))
        surely = [good for good, (_, row) in zip(is_right, rows, strict=True) if row["score"] >= HIGH]
        lines += [
            "",
            f"### Round {number}, rules of {rules}",
            "",
            f"- right kind first: **{right} of {len(rows)}** ({right / max(1, len(rows)):.1%}); a wrong kind with {CERTAIN} or more: **{sure}**; incidents a bug: **{mean:.2f}**; found late: {late}",
            f"- said with {HIGH} or more: **{len(surely)}**, right **{sum(surely)}** ({sum(surely) / max(1, len(surely)):.0%})",
            *([f"- {note}"] if note else []),
            "",
            "| bug | engine | forward | kind | confidence | incidents |",
            "| --- | --- | --- | --- | ---: | ---: |",
        ]
        for (bug, row), good, mine in zip(rows, is_right, kinds, strict=True):
            kind = row["kind"] if good else f"{row['kind'] or 'nothing'}, not {mine[0]}"
            lines.append(
                f"| {bug.tracker} {bug.name} | {bug.engine} | {row['found']} of {row['reads']} | {kind} | {row['score']:.2f} | {row['incidents']} |"
            )
    return lines


def _branch(bug: Bug) -> str:
    from kvcanary.analysis.incidents.rules import RULES

    return RULES[bug.kinds[0]].branch


def _branches(bug: Bug) -> set[str]:
    from kvcanary.analysis.incidents.rules import RULES

    return {RULES[kind].branch for kind in bug.kinds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="record only bugs whose name contains this")
    parser.add_argument("--record", action="store_true", help="record, and replay nothing: for who plants a bug unseen")
    parser.add_argument("--replay", action="store_true", help="record nothing, replay what is saved")
    parser.add_argument(
        "--into", type=Path, help="record into this folder; print what is not right there, and write no page"
    )
    parser.add_argument(
        "--round", type=int, help="replay a round that was held out; keep as its first try what has none"
    )
    args = parser.parse_args()
    if args.round:
        return try_first([bug for bug in BUGS.values() if bug.held_out == args.round])
    bugs = [bug for bug in BUGS.values() if args.only in bug.trace]
    if args.into:
        args.into.mkdir(parents=True, exist_ok=True)
        record(bugs, args.into)
        return wrong([outcome(bug, args.into) for bug in bugs if (args.into / f"{bug.trace}.arrow").exists()])
    if not args.replay:
        record(bugs, DATA)
    if args.record:
        return 0
    outcomes = [outcome(bug) for bug in BUGS.values()]
    PAGE.write_text(page(outcomes))
    wrong(outcomes)
    print(f"wrote {PAGE}")
    return 0


def try_first(bugs: list[Bug]) -> int:
    """Replay a round's traces; keep as its first try what the rules of this day say of those that have none, and print all."""
    said = json.loads(FIRST_TRY.read_text())
    outcomes = [outcome(bug) for bug in bugs if (DATA / f"{bug.trace}.arrow").exists()]
    for o in outcomes:
        first = {key: getattr(o, key) for key in ("kind", "score", "found", "reads", "incidents")}
        if o.effective:
            said.setdefault(o.bug.trace, first)
        print(o.bug.trace, first, o.bug.kinds, "" if o.effective else "not effective, or not in what is recorded")
    FIRST_TRY.write_text(json.dumps(dict(sorted(said.items())), indent=1) + "\n")
    return wrong(outcomes)


def wrong(outcomes: list[Outcome]) -> int:
    """Print what is not found in time, or whose first kind is not right; return how many there are, 1 at most."""
    mine = [o for o in outcomes if o.bug.recorded]
    bad = [o for o in mine if not (o.effective and o.right and (o.bug.late or 0 <= o.found <= o.reads))]
    for o in bad:
        print(f"{o.bug.trace}: {o.kind or 'nothing'} {o.score:.2f} in forward {o.found} of {o.reads}, {o.bug.kinds}")
        print(f"    {o.sentence}")
    print(f"{len(bad)} of {len(outcomes)} bugs are not found in time, or not by their kind")
    return min(1, len(bad))


if __name__ == "__main__":
    sys.exit(main())
