"""Where things lie."""

import os
from pathlib import Path

from kvcanary.kernels.user_cache import user_cache

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"
DOCS = ROOT / "docs"
# For a process with a cache of its own: loops are compiled once, by whoever comes first, and not for each such process.
COMPILED_LOOPS = {"NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR") or str(user_cache())}
