"""The plot library that goes into the page: Vega and Vega-Lite, as vl-convert carries them."""

from typing import Final

from ..errors import AnalysisError

_SNIPPET: Final = "window.vegaEmbed = vegaEmbed;"


class NoPlotLibraryError(AnalysisError):
    """vl-convert is not installed."""


def plot_library() -> str:
    """Return the library as one ES module that leaves `vegaEmbed` behind; nothing in it loads anything.

    Raises:
        NoPlotLibraryError: vl-convert is not installed; the message says how to install it.
    """
    try:
        import vl_convert
    except ImportError:
        raise NoPlotLibraryError(
            "the page needs vl-convert-python, which carries the plot library: pip install 'kvcanary[page]'"
        ) from None
    return str(vl_convert.javascript_bundle(_SNIPPET))
