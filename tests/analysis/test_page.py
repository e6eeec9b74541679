"""The page: every number has its SQL, nothing of a report becomes markup, no network, a size that does not grow."""

import base64
import hashlib
import json
import re
import shutil
from importlib.resources import files

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.analysis.cli.page import page_command
from kvcanary.analysis.errors import SqlError
from kvcanary.analysis.page import build
from kvcanary.analysis.page.ask import Limits, plain
from kvcanary.analysis.page.build import MAX_BYTES, bounded_page, build_page, json_for_html
from kvcanary.analysis.page.content import page_content
from kvcanary.analysis.page.found import neighbourhoods
from kvcanary.analysis.store.session import open_sources
from kvcanary.analysis.store.store import build_store
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.commands import run
from ..support.hand_made import write
from ..support.page_reports import HOSTILE, PageParser, data_of, grown_report, hostile_report, parts, source_of
from ..support.places import DATA

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all

ASSETS = files("kvcanary.analysis.page") / "assets"


LIBRARY = "window.vegaEmbed = null; // </script> <!--"


def content_of(report, **limits):
    source = source_of(report)
    if source.trace is not None:
        build_store(source)
    with open_sources([source]) as session:
        return page_content(session, source, Limits(**limits))


@pytest.fixture(scope="module")
def freed(tmp_path_factory):
    """The report of data/free_too_early.arrow, its page, and the page's data; made once, not to be changed."""
    folder = tmp_path_factory.mktemp("freed")
    trace = shutil.copy(DATA / "free_too_early.arrow", folder / "free_too_early.arrow")
    report = folder / "free_too_early.report"
    report.mkdir()
    replay(trace, settings=ReplaySettings(), report=report)
    page = build_page(source_of(report)).read_text()
    return report, page, data_of(page)


@pytest.fixture(params=["free_too_early", "kv_flip_sliding", "clean_llama"])
def made(request, freed, report):
    """A report and its page's data."""
    if request.param == "free_too_early":
        return freed[0], freed[2]
    folder = report(request.param)
    return folder, content_of(folder)


def test_every_number_and_table_is_what_its_sql_gives(made):
    report, content = made
    seen = {"numbers": 0, "rows": 0}
    with open_sources([source_of(report)]) as session:
        for part in parts(content):
            table = session.sql(content["queries"][part["q"]])
            if "v" in part:
                assert part["v"] == (plain(table.column(0)[0].as_py()) if table.num_rows else None)
                seen["numbers"] += 1
            else:
                assert part["columns"] == table.column_names
                assert sorted(map(str, zip(*part["data"], strict=True))) == sorted(
                    str(tuple(plain(value) for value in row.values())) for row in table.to_pylist()
                )
                seen["rows"] += table.num_rows
        for question in content["questions"]:
            assert all(session.sql(content["queries"][number]).column_names for number in question["queries"])
    assert seen["numbers"] >= 15
    assert seen["rows"] >= 50


def test_the_map_shows_a_slot_read_by_who_does_not_hold_it(freed):
    _, _, content = freed
    map_ = content["subjects"]["shown"][0]["map"]
    assert [0, 776] in [list(row) for row in map_["rows"]]
    assert max(slot for _, slot in map_["rows"]) == 783  # the pool's last
    lives = rows(map_["lives"])
    held = [(row["request"], row["from_forward"], row["to_forward"]) for row in lives if row["slot"] == 776]
    assert sorted(held, key=lambda life: life[1]) == [("short", 0, 20), ("long", 21, None)]
    read = [row for row in rows(map_["damage"]) if row["slot"] == 776 and row["class"] == "record"]
    assert [(row["request"], row["from_forward"], row["to_forward"]) for row in read] == [("short", 22, 39)]


def test_the_chain_says_what_stands_there_and_what_was_expected(freed):
    shown = freed[2]["subjects"]["shown"]
    window = max(shown[0]["chains"], key=lambda item: item["bad_positions"])
    by_position = {row["position"]: row for row in rows(window["rows"])}
    assert (by_position[0]["stored_token"], by_position[0]["expected_token"]) == (216, 180)
    assert (by_position[0]["slot"], by_position[0]["stored_position"]) == (776, 96)
    assert by_position[0]["writer_request"] == "long"
    assert by_position[0]["stored_chain"] != by_position[0]["expected_chain"]
    assert [by_position[8][key] for key in ("slot", "stored_token", "fail_reason_bits", "writer_request")] == [
        768,
        265,
        0,
        "short",
    ]


def test_behind_a_full_to_swa_table_the_chain_has_the_groups_own_slots(tmp_path):
    report = simulated(tmp_path, "stale_swa_mapping", "swa")
    chains = [
        chain for item in content_of(report)["subjects"]["shown"] for chain in item["chains"] if chain["pool_group"]
    ]
    assert chains
    for chain in chains:
        for row in rows(chain["rows"]):
            if not row["fail_reason_bits"] and row["writer_forward"] is not None:
                assert (row["stored_position"], row["stored_token"]) == (row["position"], row["expected_token"]), row


@pytest.mark.long
def test_a_million_violations_fit(report, monkeypatch):
    folder = report("free_too_early")
    grown_report(folder, 150_000)
    monkeypatch.setattr(build, "plot_library", lambda: "x" * 900_000)
    page = build_page(source_of(folder))
    assert page.stat().st_size < MAX_BYTES / 2
    data = data_of(page.read_text())
    violations = pq.read_table(folder / "violations.parquet", columns=["num_forwards"])  # rows that last
    assert data["numbers"]["violations"]["v"] == sum(violations["num_forwards"].to_pylist()) > 1_000_000
    assert data["numbers"]["findings"]["v"] == 7_500
    assert len(data["rows"]["violations"]["data"][0]) == data["limits"]["rows"]
    shown = data["subjects"]["shown"][0]
    assert len(shown["map"]["slots"]["data"][0]) < shown["map"]["total"]["v"]
    assert data["timeline"]["width"] > 1
    assert len(set(data["timeline"]["damage"]["data"][0])) <= data["limits"]["bins"]


def test_a_page_too_large_shows_less(freed, monkeypatch):
    asked = []

    def content(session, source, limits):
        asked.append(limits.rows)
        return {"limits": {"rows": limits.rows}, "text": "x" * 1000 * limits.rows}

    monkeypatch.setattr(build, "page_content", content)
    monkeypatch.setattr(build, "MAX_BYTES", 150_000)
    page = bounded_page(None, source_of(freed[0]), "")
    assert asked == [200, 100, 50]
    assert len(page) <= 150_000
    assert data_of(page.decode())["limits"]["rows"] == 50
    monkeypatch.setattr(build, "MAX_BYTES", 1)  # nothing fits: an end all the same
    assert data_of(bounded_page(None, source_of(freed[0]), "").decode())["limits"]["rows"] == 1


def test_nothing_of_a_report_becomes_markup(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "plot_library", lambda: LIBRARY)
    page = build_page(source_of(hostile_report(tmp_path))).read_text()
    found = PageParser(page)
    assert [tag for tag, _ in found.elements if tag in ("script", "style", "img", "iframe", "link", "object")] == [
        "style", "script", "script", "script",
    ]  # fmt: skip
    assert not [name for _, attrs in found.elements for name in attrs if name.startswith("on")]
    data = data_of(page)
    texts = json.dumps(data, ensure_ascii=False)
    assert HOSTILE in [row["name"] for row in rows(data["requests"]["list"])]
    assert HOSTILE in [row["note"] for row in rows(data["timeline"]["marks"])]
    assert HOSTILE in [row["detail"] for row in rows(data["rows"]["findings"])]
    assert HOSTILE[:20] in texts
    assert page.isascii() or page.count(HOSTILE[:20]) == 0


def test_nothing_of_a_report_becomes_sql(tmp_path):
    report = hostile_report(tmp_path)
    path = report / "findings.parquet"
    findings = pq.read_table(path)
    hurt = tmp_path / "hurt.csv"
    texts = {"kind": f"x\ncopy (select 1) to '{hurt}';\n--", "slot": 1 << 60}
    changed = [{**row, **texts} for row in findings.to_pylist()]
    pq.write_table(pa.Table.from_pylist(changed, schema=findings.schema), path)
    content = content_of(report)
    assert not hurt.exists()
    assert {row["slot"] for subject in content["subjects"]["shown"] for row in rows(subject["map"]["slots"])} >= {
        str(1 << 60)
    }


def test_json_cannot_leave_its_script():
    value = {"a": "</script>", "b": "<!-- & \u2028 \ud800", "c": 1 << 60}
    text = json_for_html(value)
    assert not set(text) & set("<>&")
    assert text.isascii()
    assert json.loads(text) == value
    assert [plain(v) for v in (1 << 60, float("nan"), b"\x01", "x" * 500)] == [
        "1152921504606846976",
        "nan",
        "01",
        "x" * 399 + "…",
    ]


def test_the_page_may_load_nothing(freed):
    _, page, _ = freed
    found = PageParser(page)
    [policy] = [attrs["content"] for _, attrs in found.elements if attrs.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    wanted = {"script-src": set(), "style-src": set()}
    for tag, attrs, text in found.code:
        if attrs.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            wanted[f"{tag}-src"].add(f"'sha256-{digest}'")
    assert {name: set(value.split()) for name, value in rules.items()} == wanted  # hashes, nothing 'unsafe'
    assert not [attrs for _, attrs in found.elements if "src" in attrs or not attrs.get("href", "#").startswith("#")]
    addresses = set(re.findall(r"https?://[^\s\"'`)\\]+", page))
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/2000/xmlns/"}
    # the library's own: its schema's name, a link of a menu that is switched off, and a comment
    names |= {"https://vega.github.io/schema/vega/v6.json", "https://vega.github.io/schema/vega-lite/v6.json"}
    assert {
        a for a in addresses - names if not re.match(r"https://(vega\.github\.io/editor/|github\.com/vega/)", a)
    } == set()
    assert len(page) < 1_600_000


def test_our_scripts_set_text_only():
    for asset in ASSETS.iterdir():
        if asset.name.endswith(".js"):
            code = asset.read_text()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|fetch\(|XMLHttp|import\(",
                code,
            ), asset.name


def test_every_script_is_in_the_page():
    from kvcanary.analysis.page import build, fleet

    scripts = {*build.SCRIPTS, *fleet.SCRIPTS}
    assert {asset.name for asset in ASSETS.iterdir() if asset.name.endswith(".js")} == scripts


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_both_themes(theme):
    css = (ASSETS / "page.css").read_text()
    block = re.search(
        r":root \{(.*?)\}" if theme == "light" else r':root\[data-theme="dark"\] \{(.*?)\}', css, re.DOTALL
    )[1]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    again = re.search(r':root:not\(\[data-theme="light"\]\) \{(.*?)\}', css, re.DOTALL)[1]
    assert theme == "light" or dict(re.findall(r"--([\w-]+): (#\w{6});", again)) == colours
    for ink, ground in [
        ("ink", "card"),
        ("ink", "bg"),
        ("soft", "card"),
        ("soft", "bg"),
        ("accent", "card"),
        ("bad", "card"),
        ("bad", "bad-soft"),
        ("soft", "bad-soft"),
        ("ok", "card"),
        ("warn", "card"),
        ("ink", "warn-soft"),
    ]:
        assert contrast(colours[ink], colours[ground]) >= 4.5, (theme, ink, ground)


def contrast(one, other):
    def light(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_losses_and_gaps_are_told(tmp_path):
    trace = write(tmp_path / "lossy.arrow")
    folder = tmp_path / "lossy.report"
    folder.mkdir()
    replay(trace, settings=ReplaySettings(), report=folder)
    unknown = content_of(folder)["unknown"]
    assert (unknown["whole"], unknown["losses"]["v"], unknown["lost_events"]["v"]) == (False, 1, 4)
    assert [(row["kind"], row["forward"], row["reason"]) for row in rows(unknown["places"])] == [
        ("loss", 1, "queue full")
    ]


def test_without_its_trace_the_page_shows_what_the_report_has(report, monkeypatch):
    folder = report("table_swap")
    (folder.parent / "table_swap.arrow").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"trace": "/nowhere/table_swap.arrow"}))
    monkeypatch.setattr(build, "plot_library", lambda: "")
    data = data_of(build_page(source_of(folder)).read_text())
    assert (data["present"], data["numbers"]["violations"]["v"]) == (False, 36)
    assert "forwards" not in data["numbers"]
    assert data["unknown"]["words"] == ["the trace is not at hand"]
    [window] = data["subjects"]["shown"][0]["chains"]
    assert rows(window["rows"])[0]["writer_request"] == "shared-b"


def test_a_message_of_several_lines_is_shown_as_such(report, monkeypatch):
    def refuse(*_):
        raise SqlError("Out of Memory Error: no room\nPossible solutions: none")

    monkeypatch.setattr(build, "build_page", refuse)
    done = CliRunner().invoke(page_command, [str(report("kv_flip"))])
    assert (done.exit_code, done.stderr) == (2, "Error: Out of Memory Error: no room\n  Possible solutions: none\n")


def test_places_of_damage_share_ranges_and_fit_the_limits():
    few = neighbourhoods([(0, 10), (0, 12), (1, 3)], {0: 100, 1: 5}, Limits())
    assert few == [(0, 8, 14), (1, 1, 4)]
    assert neighbourhoods([(0, 10)], {}, Limits()) == [(0, 6, 10)]  # a pool of unknown size
    many = neighbourhoods([(0, slot) for slot in range(10, 5000, 10)], {0: 9000}, Limits(slots=9, places=5))
    assert many == [(0, 9, 11), (0, 19, 21), (0, 29, 31)]
    assert neighbourhoods([(0, slot) for slot in range(10, 5000, 10)], {0: 9000}, Limits(slots=99, places=2)) == [
        (0, 9, 11),
        (0, 19, 21),
    ]
    assert neighbourhoods([(0, 7)], {0: 5}, Limits()) == [(0, 3, 7)]  # beyond the pool
    assert neighbourhoods([], {}, Limits()) == []


def rows(table):
    return [dict(zip(table["columns"], values, strict=True)) for values in zip(*table["data"], strict=True)]


def simulated(folder, fault, config):
    done = run("lab", "run", "--fault", fault, "--config", config, "--seed", 3, "-o", folder / "trace.arrow")
    assert done.returncode == 0, done.stderr
    report = folder / "trace.report"
    report.mkdir()
    replay(folder / "trace.arrow", settings=ReplaySettings(), report=report)
    return report
