"""Writes a report's page."""

import base64
import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ...kernels.user_cache import user_cache
from ...recorder.files import replace_file
from ...replayer.report.report import PAGE_NAME
from ..errors import AnalysisError, NoPlotLibraryError
from ..store.output import private_output, spare
from ..store.session import SqlSession, open_sources
from ..store.sources import Source
from ..store.store import check_writable, made_store
from .ask import Limits
from .content import page_content

MAX_BYTES: Final = 5_000_000
MEMORY_LIMIT: Final = "2GB"


def build_page(source: Source, target: Path | None = None) -> Path:
    """Write the page of a report, by default `report.html` in its folder, for this user only, and return its path.

    It is answered from report.duckdb, made if none fits. Raises `AnalysisError`, without vl-convert `NoPlotLibraryError`.
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
    made_store(source)  # a folder that cannot be written: slower, the same answers
    with open_sources([source], memory_limit=MEMORY_LIMIT) as session:
        page = bounded_page(session, source, library)
    try:
        with private_output(path) as file:  # half a page would open, and show less than there is
            file.write(page)
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be written ({error.strerror or error}); name another with -o") from None
    return path


def bounded_page(session: SqlSession, source: Source, library: str, *, limits: Limits | None = None) -> bytes:
    """Return the page, with fewer of everything where it would be larger than `MAX_BYTES`."""
    limits = limits or Limits()
    while True:
        page = page_document(page_content(session, source, limits), library).encode()
        if len(page) <= MAX_BYTES or limits == limits.halved():
            return page
        limits = limits.halved()


_SNIPPET: Final = "window.vegaEmbed = vegaEmbed;"


def plot_library() -> str:
    """Return the library as one ES module that leaves `vegaEmbed` behind, from the cache; raise `NoPlotLibraryError`."""
    try:
        import vl_convert
    except ImportError:
        raise NoPlotLibraryError(
            "the page needs vl-convert-python, which carries the plot library: pip install 'kvcanary[replay]'"
        ) from None
    kept = user_cache() / f"plots-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, ValueError):
        digest, _, text = kept.read_text(encoding="utf-8").partition("\n")
        if text and digest == _digest(text):  # it is whole
            return text
    library = str(vl_convert.javascript_bundle(_SNIPPET))
    with contextlib.suppress(OSError):  # it is made anew then
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(kept, f"{_digest(library)}\n{library}".encode())
    return library


def _digest(text: str) -> str:
    return f"// sha256 {hashlib.sha256(text.encode()).hexdigest()}"


_ASSETS: Final = files(__package__) / "assets"
# In this order: each uses what stands before it.
SCRIPTS: Final = (
    *("dom.js", "state.js", "sql.js", "rows.js", "plots.js", "head.js", "theme.js", "subjects.js", "timeline.js"),
    *("slot_map.js", "chain.js", "requests.js", "main.js"),
)
_SLOT: Final = re.compile(r"\{\{(\w+)\}\}")


def page_document(
    content: Mapping[str, Any], library: str, *, scripts: Sequence[str] = SCRIPTS, html: str = "page.html"
) -> str:
    """Return the whole page; `content` is data only, and cannot become markup or script."""
    style = _asset("page.css")
    script = "\n".join(_asset(name) for name in scripts)
    library = _inside_script(f"/*!\n{_asset('licences.txt')}*/\n{library}")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}"
    )
    parts = {"policy": policy, "style": style, "data": json_for_html(content), "library": library, "script": script}
    return _SLOT.sub(lambda found: parts[found[1]], _asset(html))


def json_for_html(value: object) -> str:
    r"""Return JSON that can stand between script tags: ASCII, and `<`, `>` and `&` as `\u` escapes."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _inside_script(code: str) -> str:
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
