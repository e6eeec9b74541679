"""Every script in examples/ runs as it stands and says what it promises."""

import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

from .support.places import ROOT

EXAMPLES = ROOT / "examples"
# What each prints at least; the bisected engine is run by its page's test (tests/analysis/test_tutorial.py).
EXPECTED = {
    "hunt_transformers.py": None,  # engines for kvcanary hunt, which docs/results/found.md was made with
    "hunt_vllm.py": None,
    "mini_sglang.py": None,  # an adapter: tests/conformance/mini_sglang checks it
    "nano_vllm.py": None,  # an adapter: tests/recorder/test_paged.py runs it
    "record_gllm.py": None,  # an adapter: tests/conformance/gllm checks it
    "record_lightllm.py": None,  # an adapter: tests/conformance/lightllm checks it
    "record_lmdeploy.py": None,  # an adapter: tests/conformance/lmdeploy checks it
    "record_swiftllm.py": None,  # an adapter: tests/conformance/swiftllm checks it
    "record_transformers.py": ["clean: "],
    "triage_notebook.py": ["corrupt 294 violations", "free_too_early", "7f6f6bd2"],
    "tutorial_engine.py": None,
}


def test_every_example_is_known():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(name for name, shown in EXPECTED.items() if shown))
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert [shown for shown in EXPECTED[name] if shown not in printed] == []
    for picture in re.findall(r"\S+\.svg", printed):
        assert "<svg" in Path(picture).read_text()
