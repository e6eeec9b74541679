"""Takes away, when imported, what whoever runs the tests has set for programs of theirs.

It is not for the engines, compilers, tables, terminals and repositories of the tests. Libraries read it when they are
imported, so it goes before that; caches stay where they are.
"""

import os
from pathlib import Path

STRAY = ("KVCANARY_", "NUMBA_", "TRITON_", "POLARS_", "GIT_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR")
KEPT = ("KVCANARY_CHROMIUM", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
for name in [name for name in os.environ if name.startswith(STRAY) and name not in KEPT]:
    del os.environ[name]

# Where there is no GPU, kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
