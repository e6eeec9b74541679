"""The page of a fleet in a browser: pictures, a bad node, a way to a recording's own page; no console message, no network."""

import pytest

from ..analysis.test_reports_table import write_report
from ..support.commands import run


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    for number in range(48):
        bad = number % 8 == 5
        node = {"server": "<img src=x>" if number % 8 == 7 else f"gpu-{number % 8}", "servers": 0.1, "windows": 0.1}
        kinds = ("stale", "wild") if bad else ()
        write_report(
            folder / "reports", f"t{number}", version=f"0.3{number % 3}", day=number % 6, kinds=kinds, sampling=node
        )
    (folder / "reports" / "t5.report" / "report.html").write_text("<h1>its own page</h1>")
    assert run("collect", folder / "reports", folder / "table").returncode == 0
    done = run("fleet", "page", folder / "table", "-o", folder / "fleet.html")
    assert done.returncode == 0, done.stderr
    return folder / "fleet.html"


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"width": 390, "height": 800}], ids=["light", "dark", "phone"])
def test_a_bad_node_stands_out(fleet, show, look):
    page = show(fleet, **look)
    assert page.inner_text("#verdict-word") == "6 of 48 corrupt"
    text = page.inner_text("main")
    assert not [word for word in ("undefined", "[object", "NaN") if word in text]
    fields = page.locator("#nodes .plot svg .mark-rect path").evaluate_all(
        "all => all.map(one => one.getAttribute('fill'))"
    )
    assert len(fields) == 24
    assert sorted(map(fields.count, set(fields))) == [3, 21]
    assert page.locator("#nodes svg text", has_text="gpu-5").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_recording_leads_to_its_own_page(fleet, show):
    page = show(fleet)
    links = page.locator("#recordings a")
    assert links.count() == 1
    assert links.get_attribute("href") == "./reports/t5.report/report.html"
    page.locator("#recordings button", has_text="Copy").first.click()
    assert page.locator("#recordings button", has_text="Cop").count() == 5
    page.locator("#trends button.sql").first.click()
    assert "kinds_by_day" in page.inner_text("dialog")
