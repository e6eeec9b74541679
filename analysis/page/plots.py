"""The plot library that goes into the page: Vega and Vega-Lite, as vl-convert carries them."""

import contextlib
import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from ...kernels.user_cache import user_cache
from ..errors import AnalysisError

_SNIPPET: Final = "window.vegaEmbed = vegaEmbed;"


class NoPlotLibraryError(AnalysisError):
    """vl-convert is not installed."""


def plot_library() -> str:
    """Return the library as one ES module that leaves `vegaEmbed` behind; nothing in it loads anything.

    vl-convert takes two seconds to put it together, so it is kept in the user's cache.

    Raises:
        NoPlotLibraryError: vl-convert is not installed; the message says how to install it.
    """
    try:
        import vl_convert
    except ImportError:
        raise NoPlotLibraryError(
            "the page needs vl-convert-python, which carries the plot library: pip install 'kvcanary[page]'"
        ) from None
    kept = user_cache() / f"plots-{version('vl-convert-python')}.js"
    library = _kept(kept)
    if library is None:
        library = str(vl_convert.javascript_bundle(_SNIPPET))
        _keep(kept, library)
    return library


def _kept(path: Path) -> str | None:
    """Return what was kept, None where nothing was, or where it is not whole: its first line is the rest's digest."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return text if text and digest == _digest(text) else None


def _keep(path: Path, text: str) -> None:
    """Keep a text for the next time; where that cannot be, it is made anew then."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{_digest(text)}\n{text}")
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _digest(text: str) -> str:
    return f"// sha256 {hashlib.sha256(text.encode()).hexdigest()}"
