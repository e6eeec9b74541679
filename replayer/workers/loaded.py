"""Imported by the server before it forks workers, so that they find their libraries loaded."""

import sys
import warnings
from types import TracebackType

from ...recorder.process.endings import ignore_endings
from .worker import load


def _silent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A server that ends says nothing: workers are started without it then, and report what keeps them from it."""


sys.excepthook = _silent
ignore_endings()
# Said of threads that a library keeps for itself and ends around each fork.
warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
load()
