"""A real Chromium without a network, and pages to show it. `make page-test` runs this folder, `make test` does not."""

import os
import shutil

import pytest

from ..support.commands import run
from ..support.places import DATA
from .waiting import until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_MS = 300_000  # of each wait; what a test waits for comes, however loaded the machine is
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    """Chromium, headless, with a new profile; where there is none the tests fail, they are not skipped."""
    found = os.environ.get("KVCANARY_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("no Chromium found: install one, or name it with KVCANARY_CHROMIUM=/path/to/chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


def replayed(trace, folder):
    """Copy a trace of data/ to a folder, replay it there, and return its report."""
    original = DATA / trace
    pair = original.name in ("prefill.arrow", "decode.arrow")  # replayed together
    copies = [
        shutil.copy(path, folder / path.name) for path in (original.parent.glob("*.arrow") if pair else [original])
    ]
    done = run("replay", "--quiet", *copies)
    assert done.returncode in (0, 1), done.stderr
    return folder / f"{original.stem}.report"


def made_page(report):
    done = run("page", report)
    assert done.returncode == 0, done.stderr
    return report / "report.html"


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Pages of traces in data/, by name, each made once."""
    made = {}

    def page(trace):
        if trace not in made:
            made[trace] = made_page(replayed(trace, tmp_path_factory.mktemp("page")))
        return made[trace]

    return page


class Watched:
    """A page in a browser, and all that it did beside showing itself."""

    def __init__(self, page, *, silent):
        self.page = page
        self.silent = silent
        self.requests = []
        self.said = []


@pytest.fixture
def show(browser):
    """Opens a page at a width and in a theme; at the end it must have asked nothing of the network, nor complained."""
    opened = []

    def show(path, *, width=1280, height=900, dark=False, silent=True, hash_=""):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light",
            has_touch=width < 600, reduced_motion="reduce",
        )  # fmt: skip
        context.set_default_timeout(PATIENCE_MS)
        address = path.absolute().as_uri()
        page = context.new_page()
        watched = Watched(page, silent=silent)
        opened.append((context, watched))

        def decide(route):
            watched.requests.append(route.request.url)
            if route.request.url.split("#")[0] == address:
                route.continue_()
            else:
                route.abort()

        context.route("**/*", decide)
        page.on("websocket", lambda socket: watched.requests.append(socket.url))
        page.on("console", lambda message: watched.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: watched.said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (watched.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address + hash_)
        page.wait_for_selector("html[data-ready]")
        drawn = "(plot) => plot.querySelector('svg') || plot.offsetParent === null"  # of no slot there is no map
        until(page, f"[...document.querySelectorAll('.plot')].every({drawn})")
        return page

    yield show
    for context, watched in opened:
        address = watched.page.url.split("#")[0]
        context.close()
        assert set(watched.requests) == {address}
        assert watched.said == [] or not watched.silent
