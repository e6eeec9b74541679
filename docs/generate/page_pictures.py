"""Draw the pictures in docs/guide/page.md: `python docs/generate/page_pictures.py` (needs playwright, pillow and a Chromium).

The page is that of data/simulated/mla_free_too_early.arrow, a use after free. Each picture stays below 250 KB.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "data" / "simulated" / "mla_free_too_early.arrow"
MAX_BYTES = 250_000
# name: width, height, dark, the section at the top of the picture
PICTURES = {
    "page-light": (1280, 1520, False, "verdict"),
    "page-dark": (1280, 1400, True, "slots"),
    "page-phone": (390, 1500, False, "verdict"),
}
CHROMIUM = os.environ.get("KVCANARY_CHROMIUM") or shutil.which("chromium")


def replayed(folder: Path) -> Path:
    """Replay the trace with kvcanary-replay, and return the page that it leaves."""
    trace = shutil.copy(TRACE, folder / TRACE.name)
    code = "from kvcanary.cli import replay_main; replay_main()"
    subprocess.run([sys.executable, "-c", code, "--quiet", "--page", trace], check=False)
    return folder / f"{TRACE.stem}.report" / "report.html"


def small(picture: bytes) -> bytes:
    """Return a PNG with as many colours as fit."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (256, 128, 64, 32):
        out = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(out, "png", optimize=True)
        if out.tell() <= MAX_BYTES:
            return out.getvalue()
    raise SystemExit("a picture does not fit; make it smaller")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = replayed(Path(folder))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for name, (width, height, dark, section) in PICTURES.items():
            tab = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            )
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]")
            tab.wait_for_timeout(1500)
            tab.evaluate("(id) => document.getElementById(id).scrollIntoView()", section)
            tab.wait_for_timeout(300)
            (ROOT / "docs" / "pictures" / f"{name}.png").write_bytes(small(tab.screenshot()))
        browser.close()
