"""Write docs/internals/observed.md from the adapters' tables: `python docs/generate/observed_page.py`."""

from pathlib import Path

from kvcanary.recorder.engines.common.observed_page import observed_page

if __name__ == "__main__":
    (Path(__file__).parents[1] / "internals" / "observed.md").write_text(observed_page(), encoding="utf-8")
