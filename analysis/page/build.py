"""Writes a report's page."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...replayer.report.report import PAGE_NAME
from ..errors import AnalysisError
from ..store.output import private_output, spare
from ..store.session import Session, open_sources
from ..store.sources import Source
from ..store.store import build_store, check_writable, fresh_store
from .ask import Limits
from .content import page_content
from .document import page_document
from .plots import plot_library

MAX_BYTES: Final = 5_000_000
MEMORY_LIMIT: Final = "2GB"


def build_page(source: Source, target: Path | None = None) -> Path:
    """Write the page of a report, by default `report.html` in its folder, and return its path.

    The queries are answered from report.duckdb, which is made first where there is none that fits. The file can be read
    by this user only, for it may hold tokens.

    Raises:
        NoPlotLibraryError: vl-convert is not installed.
        AnalysisError: there is no report, it cannot be read, or the page cannot be written or would take its place.
    """
    if source.report is None:
        raise AnalysisError(
            f"{source.trace}: no report beside it; run kvcanary-replay {shlex.quote(str(source.trace))}"
        )
    path = target or source.report / PAGE_NAME
    if not path.parent.is_dir():
        raise AnalysisError(f"{path.parent}: no such folder; make it, or name another place with -o")
    spare(source.kept, path)
    if target is None:
        check_writable(source.report)
    library = plot_library()  # what is missing is said before any work
    with _session(source) as session:
        page = bounded_page(session, source, library)
    try:
        with private_output(path) as file:  # half a page would open, and show less than there is
            file.write(page)
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be written ({error.strerror or error}); name another with -o") from None
    return path


def bounded_page(session: Session, source: Source, library: str, *, limits: Limits | None = None) -> bytes:
    """Return the page, with fewer of everything where it would be larger than `MAX_BYTES`."""
    limits = limits or Limits()
    while True:
        page = page_document(page_content(session, source, limits), library).encode()
        if len(page) <= MAX_BYTES or limits == limits.halved():
            return page
        limits = limits.halved()


@contextlib.contextmanager
def _session(source: Source) -> Iterator[Session]:
    """Open the report's store, made first if need be; the files themselves where it cannot be made."""
    if source.trace is not None and fresh_store(source) is None:
        with contextlib.suppress(AnalysisError):  # a folder that cannot be written: slower, the same answers
            build_store(source)
    with open_sources([source], memory_limit=MEMORY_LIMIT) as session:
        yield session
