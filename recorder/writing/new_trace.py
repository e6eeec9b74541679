"""Beginning a trace under a name that nobody has taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from ..errors import TraceExistsError
from ..trace.segment_names import base_name

_T = TypeVar("_T")

MAX_TRIES: Final = 100


def begin_new(path: Path, begin: Callable[[Path], _T]) -> _T:
    """Return what `begin` makes of a path, or where that is taken, of the first of `NAME-1.arrow` and so on that is not.

    A process's trace is named after the second and the process's id: containers that share a folder may have both alike.

    Raises:
        TraceError, FileExistsError: as `begin` does.
    """
    for number in range(MAX_TRIES):
        try:
            return begin(path.with_name(f"{base_name(path)}-{number}.arrow") if number else path)
        except (TraceExistsError, FileExistsError):
            continue
    return begin(path)
