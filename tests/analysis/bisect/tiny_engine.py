"""An engine in a git repository of its own: small, recorded, and in commit 19 of 30 with a bug."""

import os
import subprocess
from pathlib import Path

COMMITS, FIRST_BAD = 30, 19

ENGINE = '''"""A tiny engine: it serves four requests, and records them."""

import sys

from kvcanary.recorder.engines.simulated.batch import BatchBuilder
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload

REVISION = {revision}


class Builder(BatchBuilder):
    def positions(self, prefix_lens, extend_lens):
        return super().positions(prefix_lens, extend_lens){bug}


def main(trace):
    workload = RandomWorkload(requests=4, prompt_tokens=20, output_tokens=6, max_tokens=60)
    with SimulatedEngine(EngineConfig(num_pages=200, width=64), workload, trace, overwrite=True) as engine:
        engine.builder.__class__ = Builder
        engine.run()


if __name__ == "__main__":
    {guard}main(sys.argv[1])
'''


def git(folder: Path, *words: str) -> str:
    """Run git in a folder, whatever the user's configuration says."""
    who = {
        f"GIT_{role}_{field}": "tester@example.org" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"git {words}: {done.stdout}{done.stderr}"
    return done.stdout


def source(revision: int, *, untestable: int) -> str:
    """Return the engine of a commit; that of `untestable` does not start."""
    bug = " + (prefix_lens > 24).any()" if revision >= FIRST_BAD else ""
    guard = "sys.exit('this revision does not start')\n    " if revision == untestable else ""
    return ENGINE.format(revision=revision, bug=bug, guard=guard)


def make_repository(folder: Path, *, untestable: int) -> list[str]:
    """Make the repository and return its commits, oldest first."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for revision in range(1, COMMITS + 1):
        (folder / "engine.py").write_text(source(revision, untestable=untestable))
        git(folder, "add", "engine.py")
        git(folder, "commit", "-q", "-m", f"Revision {revision}")
    return git(folder, "rev-list", "--reverse", "main").split()
