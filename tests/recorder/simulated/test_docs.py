"""The documented example runs as it stands."""

import re
from pathlib import Path

from ...support.engines.simulated_engines import judge

DOCS = Path(__file__).parents[3] / "docs" / "guide" / "simulated-engine.md"


def test_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(DOCS), "exec"), {})
    finished, freed = map(int, capsys.readouterr().out.split())
    assert finished == 20
    assert freed > 0
    assert judge(tmp_path / "trace.arrow").verdict.value == "clean"
