"""The page as a person uses it: pictures, choices, keys, themes, a phone; no console message, no network.

`show` (conftest.py) holds the last two at the end of every test.
"""

import json
import re
import subprocess
from pathlib import Path

import duckdb
import kvcanary.analysis.page
import pytest

from ..support.places import DATA
from .conftest import made_page
from .waiting import until

TRACES = sorted(str(path.relative_to(DATA)) for path in DATA.glob("**/*.arrow"))


def texts(page, selector):
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def window(page):
    return int(page.input_value("#from-forward")), int(page.input_value("#to-forward"))


@pytest.mark.parametrize("trace", TRACES)
def test_every_trace_in_data_shows_itself(pages, show, trace):
    made = pages(trace)
    page = show(made)
    verdict = page.inner_text("#verdict-word")
    assert verdict == json.loads((made.parent / "summary.json").read_text())["verdict"].upper()
    text = re.sub("NaN(?=,| in )", "", page.inner_text("main"))  # what a check looks for, and what it found
    assert not [word for word in ("undefined", "[object", "NaN") if word in text]
    pictures = page.locator(".plot svg")
    assert pictures.count() >= (3 if verdict == "CLEAN" else 4)
    for number in range(pictures.count()):
        assert pictures.nth(number).locator("path, line, rect").count() > 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_use_after_free_is_seen_in_the_map(pages, show):
    page = show(pages("free_too_early.arrow"))
    # the stripe of who reads lies inside the bar of who holds, in another colour
    colours = page.evaluate(
        """() => {
            const at = (name) => [...document.querySelectorAll('#slots .legend li')].find((li) => li.textContent === name);
            const colour = (li) => getComputedStyle(li.querySelector('.swatch')).backgroundColor;
            return [colour(at('short')), colour(at('long'))];
        }"""
    )
    assert colours[0] != colours[1]
    ringed = page.locator("#slots .plot path[stroke='#d92d3a']")
    assert ringed.count() >= 8
    fills = {to_rgb(ringed.nth(i).get_attribute("fill")) for i in range(ringed.count())}
    assert fills == {colours[0]}


def to_rgb(colour):
    if colour.startswith("rgb"):
        return colour
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


def test_choosing_an_incident_a_slot_and_a_request(pages, show):
    page = show(pages("simulated/swa_stale_mapping.arrow"))
    slots = page.locator("#slots [role=option]")
    slots.nth(1).click()
    chosen = slots.nth(1).inner_text().split(" ")[0]
    assert page.inner_text(".slot-detail h3") == f"Slot {int(chosen):,}"
    requests = page.locator("#requests [role=option]")
    requests.nth(1).click()
    name = page.inner_text("#requests h3")
    assert name.startswith(requests.nth(1).inner_text().split("\n")[0].strip()[:8])
    page.locator("#subjects .chip").first.click()
    assert page.inner_text("#requests h3") != name
    reads = page.locator("#chain [role=option]")
    if reads.count() > 1:
        before = page.inner_text("#chain figcaption")
        other = next(i for i in range(reads.count()) if reads.nth(i).get_attribute("aria-selected") == "false")
        reads.nth(other).click()
        assert page.inner_text("#chain figcaption") != before
    page.locator("#chain td button.link").first.click()
    assert page.inner_text(".slot-detail h3").startswith("Slot ")


def test_clicking_a_row_of_the_map_chooses_its_slot(pages, show):
    page = show(pages("free_too_early.arrow"))
    page.locator("#slots .plot text", has_text=re.compile("^780$")).scroll_into_view_if_needed()
    label = page.locator("#slots .plot text", has_text=re.compile("^780$")).bounding_box()
    page.mouse.click(label["x"] + 120, label["y"] + label["height"] / 2)
    assert page.inner_text(".slot-detail h3") == "Slot 780"


def test_several_incidents_take_the_other_pictures_along(pages, show):
    page = show(pages("corpus/sglang-append_with_wrong_stride.arrow"))
    items = page.locator("#subjects [role=option]")
    assert items.count() > 1
    before = page.inner_text("#slots"), page.inner_text("#subjects .detail")
    items.nth(1).click()
    assert (page.inner_text("#slots"), page.inner_text("#subjects .detail")) != before
    assert items.nth(1).get_attribute("aria-selected") == "true"


def test_an_address_opens_on_an_incident_and_its_slot(pages, show):
    made = pages("corpus/sglang-append_with_wrong_stride.arrow")
    page = show(made)
    first = texts(page, "#questions dd")
    page.locator("#subjects [role=option]").nth(1).click()
    assert page.inner_text("#questions h2") == "Questions asked of incident #2"
    assert texts(page, "#questions dd") != first
    slots = page.locator("#slots [role=option]")
    chosen = slots.nth(1).inner_text()
    slots.nth(1).click()
    address = page.evaluate("location.hash")
    assert address == f"#incident=2&slot=0:{chosen}"
    for asked in (address, f"#incident=2&slot={chosen}", f"#slot={chosen}"):
        again = show(made, hash_=asked)
        assert again.locator("#subjects [aria-selected=true]").inner_text().startswith("#2")
        assert again.inner_text(".slot-detail h3") == f"Slot {int(chosen):,}"
        assert slots.nth(1).get_attribute("aria-selected") == "true"
        assert again.evaluate("document.getElementById('slots').getBoundingClientRect().top < innerHeight")
    assert show(made, hash_="#incident=99").locator("#subjects [aria-selected=true]").inner_text().startswith("#1")


def test_a_brush_over_the_strip_zooms_every_picture(pages, show):
    page = show(pages("free_too_early.arrow"))
    strip = page.locator(".plot.strip")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    before = window(page), page.inner_html("#slots .plot")
    x = box["x"] + box["width"] * 0.12
    y = box["y"] + 12
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y, steps=4)
    page.mouse.move(x + 120, y, steps=4)
    page.mouse.up()
    until(page, "(old) => document.querySelector('#slots .plot').innerHTML !== old", before[1])
    first, last = window(page)
    assert (first, last) != before[0]
    assert first < 10
    page.get_by_role("button", name="All", exact=True).click()
    assert window(page) == (0, 56)
    page.get_by_role("button", name="Around the damage").click()
    assert window(page)[0] <= 21
    assert window(page)[1] >= 39


def test_with_the_keyboard_alone(pages, show):
    page = show(pages("free_too_early.arrow"))
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.textContent") == "Skip to the verdict"
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.id") == "verdict"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.className") == "num"
    assert page.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert "select" in page.inner_text("dialog pre")
    page.keyboard.press("Escape")
    assert page.evaluate("!document.querySelector('dialog').open")
    assert page.evaluate(f"{focused}.className") == "num"  # back where it was

    page.focus("#requests [role=option][tabindex='0']")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#requests h3") == "long"
    page.keyboard.press("End")
    last = page.locator("#requests [role=option]").last
    assert last.get_attribute("aria-selected") == "true"
    page.keyboard.press("Home")
    assert page.inner_text("#requests h3") == "short"
    assert page.locator("#requests [role=option][tabindex='0']").count() == 1  # one tab stop a list

    page.focus("#slots [role=option][tabindex='0']")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".slot-detail h3") == "Slot 777"

    page.focus("#slots .plot")
    before = window(page)
    page.keyboard.press("+")
    assert window(page)[1] - window(page)[0] < before[1] - before[0]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    assert window(page) == (0, 56)

    page.fill("#from-forward", "10")
    page.fill("#to-forward", "30")
    page.keyboard.press("Tab")
    assert window(page) == (10, 30)


def test_every_stop_of_the_tab_key_can_be_seen_and_has_a_name(pages, show):
    page = show(pages("table_swap.arrow"))
    stops = page.evaluate(
        """() => [...document.querySelectorAll('a, button, input, summary, [tabindex="0"]')]
            .filter((node) => node.tabIndex >= 0 && node.getClientRects().length && !node.closest('dialog'))
            .map((node) => [node.tagName, node.getAttribute('aria-label') || node.textContent.trim() ||
                document.querySelector(`label[for="${node.id}"]`)?.textContent || ''])"""
    )
    assert len(stops) > 30
    assert [stop for stop in stops if not stop[1]] == []


def test_sql_behind_a_number_and_its_copy(pages, show):
    page = show(pages("kv_flip.arrow"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".sentence .num", has_text="13").click()
    sql = "select coalesce(sum(num_forwards), 0)::bigint from violations"
    assert page.inner_text("dialog pre") == sql
    page.get_by_role("button", name="Copy SQL").click()
    page.wait_for_selector("dialog >> text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == sql
    page.get_by_role("button", name="Copy command").click()
    until(page, "async () => (await navigator.clipboard.readText()).startsWith('kvcanary sql ')")
    page.get_by_role("button", name="Close").click()
    assert page.evaluate("!document.querySelector('dialog').open")


def test_what_is_copied_cannot_steer_a_shell(pages, show):
    page = show(pages("kv_flip.arrow"))
    code = (Path(kvcanary.analysis.page.__file__).parent / "assets" / "sql.js").read_text()
    code = code[code.index("const UNSEEN") : code.index("function openSql")]
    name = "x\rSQL\ntouch made\n'; touch made #\x1b[201~\u202e"
    command = page.evaluate(
        f"text => {{ const page = {{report: 'a report'}}; {code} return shellCommand(plainSql(text)); }}",
        f"select '{name.replace(chr(39), chr(39) * 2)}'",
    )
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", command)
    told = subprocess.run(
        ["bash", "-c", f"kvcanary() {{ printf '%s' \"$3\"; }}; {command}"], capture_output=True, text=True, check=True
    )
    assert duckdb.sql(told.stdout).fetchall() == [(name,)]


@pytest.mark.parametrize("dark", [False, True])
def test_themes(pages, show, dark):
    page = show(pages("free_too_early.arrow"), dark=dark)
    ground = "getComputedStyle(document.body).backgroundColor"
    light, night = "rgb(245, 246, 248)", "rgb(13, 17, 23)"
    assert page.evaluate(ground) == (night if dark else light)
    axis = "getComputedStyle(document.querySelector('#slots .plot text')).fill"
    shown = night if dark else light
    for wanted in (light, night):
        before = page.evaluate(axis)
        page.click("#theme")
        assert page.evaluate(ground) == wanted
        if wanted != shown:  # the pictures follow
            until(page, f"before => {axis} !== before", before)
        shown = wanted
    page.click("#theme")
    assert page.evaluate(ground) == (night if dark else light)


@pytest.mark.parametrize("trace", ["free_too_early.arrow", "sglang/req_to_token_h200.arrow", "clean_llama.arrow"])
@pytest.mark.parametrize("width", [390, 768])
def test_on_a_phone_nothing_runs_off_the_side(pages, show, trace, width):
    page = show(pages(trace), width=width, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter((node) => !node.closest('.scroll, .links, nav, svg, dialog'))
            .filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5).map((node) => node.className || node.tagName)"""
    )
    assert wide == []
    if page.locator("#requests [role=option]").count() > 1:
        page.locator("#requests [role=option]").nth(1).tap() if width < 600 else page.locator(
            "#requests [role=option]"
        ).nth(1).click()
        assert page.locator("#requests [role=option]").nth(1).get_attribute("aria-selected") == "true"


def test_hostile_names_are_text(tmp_path, show):
    from ..support.page_reports import HOSTILE, hostile_report

    page = show(made_page(hostile_report(tmp_path)))
    assert page.evaluate("window.hurt") is None
    assert page.locator("img").count() == 0
    assert HOSTILE[:30] in page.inner_text("#requests")
    page.locator("#rows").scroll_into_view_if_needed()
    assert json.loads(
        page.inner_text("#report-data") or page.evaluate("document.getElementById('report-data').textContent")
    )


def test_the_policy_stops_what_gets_in_all_the_same(pages, show):
    page = show(pages("clean_llama.arrow"), silent=False)
    stopped = page.evaluate(
        """async () => {
            const seen = [];
            const stopped = new Promise((done) => document.addEventListener('securitypolicyviolation', (event) => {
                event.stopImmediatePropagation();
                if (seen.push(event.effectiveDirective) === 3) done();
            }));
            const image = new Image();
            image.src = 'https://example.invalid/x.png';
            await fetch('https://example.invalid/').catch(() => {});
            document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.hurt = 1' }));
            await stopped;
            return [seen.sort(), window.hurt ?? null];
        }"""
    )
    assert stopped == [["connect-src", "img-src", "script-src-elem"], None]
