"""From what `kvcanary-replay --json` prints to Markdown: a line a recording, then each incident with its sentence."""

import json
import sys
from typing import Any


def recordings(said: Any) -> list[dict[str, Any]]:
    """Return what was said of each recording: of one it is an object, of several a list, of a folder a part."""
    if isinstance(said, dict):
        said = said.get("recordings", [said])
    return list(said)


def plain(text: object) -> str:
    """Return text that Markdown leaves as it is."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in " ".join(str(text).split()))


def markdown(found: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = ["## kvcanary", "", "| recording | verdict | forwards | violations | findings |", "|---|---|--:|--:|--:|"]
    for one in found:
        numbers = [f"{one.get(name, 0):,}" for name in ("forwards", "violations", "findings")]
        lines.append(
            "| " + " | ".join([plain(one.get("trace", "")), one.get("verdict", "unreadable"), *numbers]) + " |"
        )
    for one in found:
        if one.get("error"):
            lines += ["", plain(one["error"])]
        for number, incident in enumerate(one.get("incidents", []), 1):
            lines += [
                "",
                f"**{number}. {plain(incident['title'])}** ({plain(incident['kind'])}, confidence {incident['confidence']})",
            ]
            lines += ["", plain(incident["sentence"])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = sys.stdin.read()
    try:
        sys.stdout.write(markdown(recordings(json.loads(text))))
    except ValueError:
        sys.stdout.write("## kvcanary\n\nThe replay did not come to a verdict; its step's log says why.\n")
