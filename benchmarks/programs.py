"""How a benchmark starts this package's programs: by their scripts, or as a module from a checkout on PYTHONPATH."""

import sys
from pathlib import Path

_AS_MODULE = {"kvcanary": (), "kvcanary-replay": ("replay",)}


def program(name: str) -> list[str]:
    """Return the command that runs `kvcanary` or `kvcanary-replay` with this interpreter."""
    script = Path(sys.executable).parent / name
    # -P: whatever folder this runs in, its files are no modules (a checkout's own folders have names of packages).
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "kvcanary", *_AS_MODULE[name]]
