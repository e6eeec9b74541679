"""JSON that everybody can read: names may come from paths and clients, and need be no text at all."""

import json
from typing import Any


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON in ASCII; what no UTF-8 text may hold, half a surrogate pair, becomes a question mark."""
    return json.dumps(whole_text(value) if "\\ud" in json.dumps(value, **options) else value, **options)


def whole_text(value: Any) -> Any:
    """Return parsed JSON, or what can be made JSON of, with question marks for halves of surrogate pairs."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace"))
