"""The page as one file: markup, styles, scripts and data, under a policy that forbids it to load or send anything."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

_ASSETS: Final = files(__package__) / "assets"
# In this order: each uses what stands before it.
_SCRIPTS: Final = (
    "dom.js",
    "state.js",
    "sql.js",
    "rows.js",
    "plots.js",
    "head.js",
    "subjects.js",
    "timeline.js",
    "slot_map.js",
    "chain.js",
    "requests.js",
    "main.js",
)
_SLOT: Final = re.compile(r"\{\{(\w+)\}\}")


def page_document(content: Mapping[str, Any], library: str) -> str:
    """Return the whole page; `content` is data only, and cannot become markup or script."""
    style = _asset("page.css")
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    library = _inside_script(f"/*!\n{_asset('licences.txt')}*/\n{library}")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}"
    )
    parts = {
        "policy": policy,
        "style": style,
        "data": json_for_html(content),
        "library": library,
        "script": script,
    }
    return _SLOT.sub(lambda found: parts[found[1]], _asset("page.html"))


def json_for_html(value: object) -> str:
    r"""Return JSON that can stand between script tags: ASCII, and `<`, `>` and `&` as `\u` escapes."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _inside_script(code: str) -> str:
    """Return code that no HTML parser takes for the end of its script."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
