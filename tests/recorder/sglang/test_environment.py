"""`KVCANARY_*` variables: read once, checked, named in the message where they are wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from kvcanary.recorder.environment import VARIABLES, RecordingSettings, is_wanted, read_environment
from kvcanary.recorder.header import PoolGroup, StateTable, TraceHeader


@pytest.mark.parametrize("environ", [{}, {"KVCANARY_TRACE": ""}, {"KVCANARY_TRACE": "  "}, {"KVCANARY_HISTORY": "?"}])
def test_nothing_is_recorded_where_no_folder_is_named(environ: dict[str, str]) -> None:
    assert not is_wanted(environ)
    assert read_environment(environ) is None


def test_defaults() -> None:
    assert read_environment({"KVCANARY_TRACE": "/traces", "PATH": "/bin"}) == RecordingSettings(folder=Path("/traces"))


def test_every_variable_is_read() -> None:
    environ = {
        "KVCANARY_TRACE": " /traces ",
        "KVCANARY_KV_WATCH_EVERY": "0",
        "KVCANARY_CAPTURE_BYTES": "32",
        "KVCANARY_SWEEP_EVERY": "7",
        "KVCANARY_FLUSH_BYTES": "1000",
        "KVCANARY_FLUSH_INTERVAL_MS": "250",
        "KVCANARY_MAX_QUEUED_BYTES": "5000",
        "KVCANARY_HISTORY": "off",
        "KVCANARY_COMPRESSION": "zstd",
    }
    assert set(environ) == set(VARIABLES)
    assert read_environment(environ) == RecordingSettings(
        folder=Path("/traces"),
        kv_watch_every=0,
        capture_bytes=32,
        sweep_every=7,
        history="off",
        compression="zstd",
        flush_bytes=1000,
        flush_interval_ns=250_000_000,
        max_queued_bytes=5000,
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KVCANARY_KV_WATCH_EVERY", "-1", "expected a whole number from 0"),
        ("KVCANARY_KV_WATCH_EVERY", "one", "expected a whole number"),
        ("KVCANARY_KV_WATCH_EVERY", "٣", "expected a whole number"),
        ("KVCANARY_CAPTURE_BYTES", "17", "expected a multiple of 16"),
        ("KVCANARY_CAPTURE_BYTES", "0", "from 16"),
        ("KVCANARY_FLUSH_INTERVAL_MS", "0", "from 1"),
        ("KVCANARY_HISTORY", "yes", "expected one of auto, on, off"),
        ("KVCANARY_COMPRESSION", "gzip", "expected one of lz4, zstd, none"),
        ("KVCANARY_TRACES", "/x", "no such setting; there are KVCANARY_TRACE,"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=name) as raised:
        read_environment({"KVCANARY_TRACE": "/traces", name: value})
    assert expected in str(raised.value)


def test_the_start_up_line_names_every_setting() -> None:
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=64),), tables=(StateTable(rows=2, width=8),), sweep_interval=5
    )
    settings = RecordingSettings(folder=Path("/t"), kv_watch_every=3, capture_bytes=32, history="off")
    line = settings.start_up_line(Path("/t/a.arrow"), header)
    parts = ("/t/a.arrow", "full 64 slots", "32 bytes", "KV watch every 3", "sweep every 5", "history off", "lz4")
    assert [part for part in parts if part not in line] == []
    assert "\n" not in line


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
