"""Records the bugs of engines of which a clone is run, with an `Engine` in tests/conformance: each in a process of its own."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "conformance"))

from bugs import load
from forking import fork, wait_for

LONGEST = 240.0  # seconds
STEPS = 500  # after which whoever is not done yet is not answered any more

Patch = Callable[[], None]


def fired_in(engines: list):
    """Return what a patch calls before the first forward that reads the damage: it leaves a mark in the trace."""
    forward: list[int] = []

    def fired() -> None:
        if not forward and engines:
            recorder = engines[0].recorder
            forward.append(int(recorder.next_forward))
            recorder.mark("real bug", {"forward": forward[0]})

    return fired


def run(
    kind: str,
    name: str,
    folder: Path,
    prepare: Callable[[str, Patch], None],
    generate: Callable[[str, Path, list], None],
) -> int:
    """Run one bug, or a setup without any; return the exit status.

    `prepare(setup, patch)` makes the engine's module ready and calls `patch` when there is something to patch; `generate` puts its
    engine into the list that it is given, writes the trace below `folder`, and closes the engine.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def act() -> None:
        engines: list = []
        bug = None if name.startswith("clean:") else load(kind)[name]
        setup = bug.setup if bug is not None else name.removeprefix("clean:")
        prepare(setup, (lambda: None) if bug is None else (lambda: bug.patch(fired_in(engines))))
        try:
            generate(setup, folder, engines)
        except BaseException:
            for one in engines:
                one.close()
            raise

    return wait_for(fork(folder / "log", act), LONGEST)


def main(kind: str, prepare: Callable[[str, Patch], None], generate: Callable[[str, Path, list], None]) -> None:
    """Run what the command line names, and say how each ended."""
    os.environ["KVCANARY_COMPRESSION"] = "zstd"
    for one in sys.argv[2:]:
        print(one, run(kind, one, Path(sys.argv[1]) / one.replace(":", "-"), prepare, generate), flush=True)


def asking(
    real: Any, setups: dict[str, Any], workload: Callable[[str], dict[int, list]]
) -> tuple[Callable[[str, Patch], None], Callable[[str, Path, list], None]]:
    """Return `prepare` and `generate` of an engine's module that calls what is to be patched when an engine has begun."""

    def prepare(setup: str, patch: Patch) -> None:
        real.SETUP = setups[setup]
        real.Engine.begun = staticmethod(patch)

    return prepare, answering(real, workload)


def answering(real: Any, workload: Callable[[str], dict[int, list]]) -> Callable[[str, Path, list], None]:
    """Return `generate` of an engine's module that is asked step by step.

    `workload` says what is asked before each step: (name, prompt, new tokens), or the name of who is aborted. A prompt that is a
    pair goes on from another's answer: (its name, more tokens).
    """

    def generate(setup: str, folder: Path, engines: list) -> None:
        (folder / "traces").mkdir(parents=True, exist_ok=True)
        made = real.Engine(folder / "traces" / "trace.arrow")
        engines.append(made)
        asked, prompts = workload(setup), {}
        for step in range(STEPS):
            for one in asked.pop(step, ()):
                if isinstance(one, str):
                    made.abort(one)
                    continue
                name, prompt, count = one
                if isinstance(prompt, tuple):
                    before, more = prompt
                    prompt = prompts[before] + made.answers[before] + more
                prompts[name] = prompt
                made.add(name, prompt, count)
            if not made.step() and not asked:
                break
        (folder / "tokens.json").write_text(json.dumps(made.answers, sort_keys=True))
        made.close()

    return generate
