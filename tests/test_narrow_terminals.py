"""On a terminal of 80 or 60 columns no line is longer, tables stay tables, and no two names are cut to the same."""

import re
import shutil
from pathlib import Path

import pytest
from click import testing
from kvcanary.replayer.lab.faults import FAULTS

from .support.commands import Done, run, run_replay
from .support.engines import nano_subject
from .support.places import DATA

LONG = "sglang-meta-llama-3-8b-instruct-2026-11-23T01-40-52-tp{}-of-2-production-eu-west-{}"
BISECT = ["bisect", "run", "--good", "clean_llama.arrow", "--bad", LONG.format(0, 1) + ".arrow"]
COMMANDS = [
    ["inspect", "."],
    ["inspect", LONG.format(0, 1) + ".arrow"],
    ["replay", "."],
    ["replay", LONG.format(0, 1) + ".arrow"],
    ["incidents", LONG.format(0, 1) + ".report"],
    ["triage", LONG.format(0, 1) + ".report"],
    ["diff", "clean_llama.arrow", LONG.format(0, 1) + ".arrow"],
    ["sql", ".", "select * from requests"],
    ["sql", ".", "from traces"],
    ["incidents", LONG.format(0, 1) + ".report", "--explain", "1"],
    ["lab", "list"],
    [
        "lab",
        "matrix",
        "--faults",
        "none",
        "--configs",
        "mha",
        "--seeds",
        "0",
        "--clean-seeds",
        "1",
        "--jobs",
        "1",
        "--force",
    ],
    ["watch", ".", "--once", "--no-report"],
    [
        "record",
        "-o",
        "recorded",
        "--",
        "cp",
        "--",
        LONG.format(0, 1) + ".arrow",
        LONG.format(1, 2) + ".arrow",
        "recorded",
    ],
    [*BISECT, "--versions", f"{BISECT[3]},{BISECT[5]}", "--fresh", "--", "cp", "{version}", "{trace}"],
    ["bisect", "log"],
    ["check-adapter", f"{nano_subject.__name__}:Engine", "--seeds", "1"],
]
CUT = ("inspect .", "replay .", "watch . --once --no-report", "record")  # two long names stand in these


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    for number, name in enumerate(("table_swap", "kv_flip")):
        shutil.copy(DATA / f"{name}.arrow", folder / f"{LONG.format(number, number + 1)}.arrow")
    shutil.copy(DATA / "clean_llama.arrow", folder)
    assert run_replay("--quiet", "--no-page", folder).exit_code == 1
    return folder


@pytest.fixture(params=[80, 60])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(testing._NamedTextIOWrapper, "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("os.nice", lambda _: 0)
    return int(request.param)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_line_is_longer(words: list[str], width: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    extra = ["--no-report"] if words[0] == "replay" else []
    done: Done = run(*words, *extra)
    text = done.stderr if words[0] == "record" else done.stdout  # the engine's own output is on the other
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).splitlines()
    assert len(lines) > 3
    # Commands and queries to paste, paths, and what a watch says of a recording stay whole, over two lines of the terminal.
    told = [line for line in lines if "kvcanary" not in line and not re.match(r"\d\d:\d\d:\d\d| +select ", line)]
    broken = [line for line in told if max(map(len, line.split()), default=0) < width - 12]
    assert [line for line in broken if len(line) > width] == []
    if " ".join(words).startswith(CUT):
        ends = re.findall(r"sgl\S*\.\.\.\S*-(\d)", "\n".join(lines))
        assert {*ends} == {"1", "2"}  # where there is less room a name is cut shorter, and its end stays
    if "--explain" in words:
        assert "select * from incident_findings where incident = 1 order by event" in "\n".join(lines)
    if words == ["lab", "list"]:
        assert {*FAULTS} <= {word for line in lines for word in line.split()}
