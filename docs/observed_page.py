"""Write docs/internals/observed.md from the adapters' tables: `python docs/observed_page.py`."""

from pathlib import Path

from kvcanary.recorder.engines.common.observed_page import observed_page

if __name__ == "__main__":
    (Path(__file__).parent / "internals" / "observed.md").write_text(observed_page(), encoding="utf-8")
