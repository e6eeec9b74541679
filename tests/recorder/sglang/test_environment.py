"""SGLang's plugin and the environment: nothing of weight happens where nothing is recorded."""

import subprocess
import sys
from pathlib import Path


def test_the_plugin_imports_nothing_of_weight_where_nothing_is_recorded() -> None:
    code = (
        "import sys; from kvcanary.recorder.engines.sglang import plugin; plugin(); "
        "print(sorted({'numpy', 'pyarrow', 'numba', 'torch', 'sglang'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_the_plugin_of_a_process_without_a_scheduler_imports_nothing_of_weight(tmp_path: Path) -> None:
    code = (
        "import sys; from kvcanary.recorder.engines.sglang import plugin; plugin(); "
        "print(sorted({'numpy', 'pyarrow', 'numba', 'torch', 'sglang'} & set(sys.modules)))"
    )
    environ = {"KVCANARY_TRACE": str(tmp_path / "traces")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
    assert not (tmp_path / "traces").exists()


def test_a_wrong_setting_is_logged_and_the_engine_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys, types; sys.modules['sglang.srt.managers.scheduler'] = types.ModuleType('scheduler'); "
        "from kvcanary.recorder.engines.sglang import plugin; plugin(); print('on')"
    )
    environ = {"KVCANARY_TRACE": str(tmp_path), "KVCANARY_CAPTURE_BYTES": "5"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert ran.stdout == "on\n"
    assert "KVCANARY_CAPTURE_BYTES is '5'" in ran.stderr
