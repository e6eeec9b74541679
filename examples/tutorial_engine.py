"""A stand-in for an engine of eight builds, for docs/guide/tutorial.md: python examples/tutorial_engine.py BUILD TRACE.

Build 4 does not start. In one of the later builds a page began to be given back while its request still read it.
"""

import sys
from pathlib import Path

from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial

BROKEN_BUILD, FIRST_BAD = 4, 6


def main(build: int, trace: Path) -> None:
    """Serve the requests of the tutorial's traces with one build, and record them."""
    if build == BROKEN_BUILD:
        sys.exit(f"build {build} does not start")
    fault = FAULTS["free_too_early"] if build >= FIRST_BAD else None
    run_trial(Trial(fault=fault, config="mla", seed=0), trace, overwrite=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
