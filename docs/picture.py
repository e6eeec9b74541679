"""Draw docs/replay.svg, the picture in the README, from a replay of data/kv_flip.arrow: `python docs/picture.py`."""

import io
import re
from pathlib import Path

from kvcanary.replayer.replay import ReplaySettings, replay
from kvcanary.replayer.screen import show
from rich.console import Console
from rich.terminal_theme import MONOKAI

ROOT = Path(__file__).parent.parent

if __name__ == "__main__":
    summary = replay(ROOT / "data" / "kv_flip.arrow", settings=ReplaySettings(), report=None)
    summary.trace = "kv_flip.arrow"
    summary.report = "kv_flip.report"
    console = Console(record=True, width=128, file=io.StringIO(), force_terminal=True, highlight=False)
    show(console, summary)
    svg = console.export_svg(title="kvcanary-replay kv_flip.arrow", theme=MONOKAI)
    # The stock template names web fonts; the picture must not load anything.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    (ROOT / "docs" / "replay.svg").write_text(svg)
