"""`kvcanary bisect run` with a virtual environment a version: made once, shared packages, a bound, and what cannot be made."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.analysis.bisect import environments
from kvcanary.analysis.cli.bisect import bisect_command

from ...support.places import COMPILED_LOOPS, DATA

# Makes an environment as uv does, but in no time: its last word is the place.
UV = f"""#!/bin/sh
for place; do :; done
mkdir -p "$place/bin" "$place/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
ln -s {sys.executable} "$place/bin/python"
"""
INSTALL = "sh -c 'echo {version} >> made; echo {version} > $VIRTUAL_ENV/version; test {version} != 3 || { echo ERROR: no 3; false; }'"
ENGINE = (
    f"case $(cat $VIRTUAL_ENV/version) in 1|2) cp {DATA}/clean_llama.arrow $0;; *) cp {DATA}/table_swap.arrow $0;; esac"
)


@pytest.fixture
def bisect(tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("uv", UV), ("pip", "#!/bin/sh\necho 'Available versions: 5, 4.post1, 4, 3, 2, 1'\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in COMPILED_LOOPS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda _: None)  # so that pip is the one above

    def run(*options, code, engine=ENGINE, env=INSTALL, versions="engine==1..4"):
        words = ["run", "--json", "--fresh", "--versions", versions, *(["--env", env] if env else []), *options]
        done = CliRunner().invoke(bisect_command, [*words, "--", "sh", "-c", engine, "{trace}"])
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if code != 2 else done.stderr

    return run


def made():
    return sorted(path.parent.name[0] for path in Path("cache/kvcanary/environments").glob("*/kvcanary-made.json"))


def test_each_version_gets_one_which_is_kept(bisect):
    found = bisect(code=125)
    assert found["versions"] == ["1", "2", "3", "4"]
    assert found["candidates"] == ["3", "4"]
    assert {one["version"]: one["words"] for one in found["judged"]}["3"] == (
        "its environment could not be made: the command ended with 1: ERROR: no 3"
    )
    bin_ = found["reproduce"].split("PATH=")[1].split(":")[0]
    assert Path(bin_, "python").exists()
    assert made() == ["1", "2", "4"]
    shared = next(Path(bin_).parent.glob("lib/*/site-packages/kvcanary-shared.pth")).read_text()
    assert repr(str(environments.packages_of(environments.OWN))) in shared
    bisect(code=125)  # only what failed is tried again
    assert Path("made").read_text().split() == ["1", "4", "2", "3", "3"]


def test_another_recipe_makes_others_and_a_bound_removes_the_oldest(bisect):
    bisect("--env-limit", "0", code=0, versions="engine==1..2", engine=ENGINE.replace("1|2", "1"))
    assert made() == ["2"]
    bisect("--share", "none", code=0, versions="engine==1..2", engine=ENGINE.replace("1|2", "1"))
    assert made() == ["1", "2", "2"]
    assert not list(Path("cache/kvcanary/environments").glob("1-*/lib/*/site-packages/*.pth"))


def test_what_an_adapter_refuses_is_skipped_with_its_reason(bisect):
    refuses = "case $(cat $VIRTUAL_ENV/version) in 2) echo 'ERROR kvcanary: not recording: no such hook'; exit;; esac; "
    found = bisect(code=125, versions="engine==1..4", engine=refuses + ENGINE, env=INSTALL.replace("!= 3", "!= 9"))
    why = {one["version"]: one["words"] for one in found["judged"]}
    assert why["2"] == "no trace was recorded; ERROR kvcanary: not recording: no such hook"
    assert found["candidates"] == ["2", "3"]


def test_what_is_wrong_is_said(bisect):
    assert "both must be released; there are 4, 4.post1, 5" in bisect(code=2, versions="engine==4..6")
    assert "--good and --bad are needed" in bisect(code=2, versions="1,2")
    assert "--share nowhere: no virtual environment" in bisect("--share", "nowhere", code=2)
    Path("tools/pip").write_text("#!/bin/sh\necho no such thing >&2\n")
    assert "pip does not know the versions of engine: no such thing" in bisect(code=2)


@pytest.mark.usefixtures("bisect")
def test_the_command_that_installs_by_default():
    assert environments.default_install("engine", Path("/shared")) == "{python} -m pip install -q engine=={version}"
    assert environments.default_install("engine", None) == "uv pip install -q engine=={version}"
