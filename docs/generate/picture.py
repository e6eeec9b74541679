"""Draw docs/pictures/replay.svg, the picture in the README, from a replay of a trace in data/: `python docs/generate/picture.py`."""

import io
import re
import tempfile
from pathlib import Path

from kvcanary import ReplaySettings, replay
from kvcanary.analysis.finishing import finish
from kvcanary.replayer.cli.screen import show
from rich.console import Console
from rich.terminal_theme import MONOKAI

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "data" / "simulated" / "mla_free_too_early.arrow"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as report:
        summary = replay(TRACE, settings=ReplaySettings(), report=Path(report))
        finish(summary)
    summary.trace = TRACE.name
    summary.report = f"{TRACE.stem}.report"
    console = Console(record=True, width=128, file=io.StringIO(), force_terminal=True, highlight=False)
    show(console, summary)
    svg = console.export_svg(title=f"kvcanary-replay {TRACE.name}", theme=MONOKAI)
    # The stock template names web fonts; the picture must not load anything.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    (ROOT / "docs" / "pictures" / "replay.svg").write_text(svg)
