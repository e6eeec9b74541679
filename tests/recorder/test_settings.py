"""Settings: from variables and a TOML file, checked, named in the message where they are wrong, all documented."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.process.environment import VARIABLES, is_wanted, read_environment
from kvcanary.recorder.process.settings import SETTINGS, RecordingSettings, WriterSettings
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader

from ..support.places import DOCS

DOCUMENT = DOCS / "guide" / "production.md"


@pytest.fixture
def salt(tmp_path: Path) -> Path:
    path = tmp_path / "salt"
    path.write_text("f" * 64)
    return path


@pytest.mark.parametrize("environ", [{}, {"KVCANARY_TRACE": ""}, {"KVCANARY_TRACE": "  "}, {"KVCANARY_HISTORY": "?"}])
def test_nothing_is_recorded_where_no_folder_is_named(environ: dict[str, str]) -> None:
    assert not is_wanted(environ)
    assert read_environment(environ) is None


def test_defaults() -> None:
    assert read_environment({"KVCANARY_TRACE": "/traces", "PATH": "/bin"}) == RecordingSettings(folder=Path("/traces"))


def in_human_units(salt: Path) -> dict[str, Any]:
    """A value other than the default for every setting, as a TOML file holds them."""
    return {
        "trace": "/traces",
        "kv_watch_every": 0,
        "capture_bytes": 32,
        "all_layers": "off",
        "outputs_every": 5,
        "sweep_every": 7,
        "history": "off",
        "compression": "zstd",
        "flush_bytes": 1000,
        "flush_interval_ms": 250,
        "max_queued_bytes": "64 MiB",
        "segment_bytes": "1gib",
        "segment_seconds": 60,
        "keep_segments": 3,
        "keep_bytes": "8GiB",
        "keep_folder_bytes": "16GiB",
        "freeze_file": "/run/freeze",
        "freeze_signal": "sigusr2",
        "tokens": "hashed",
        "token_salt_file": str(salt),
        "names": "hashed",
        "fleet": "europe",
        "server": "gpu-17",
        "sample_servers": "1 %",
        "sample_windows": "0.5%",
        "window_seconds": 60,
        "bytes_a_day": "2GiB",
        "oracle": "my.module:Mine",
    }


def as_settings(salt: Path, config: Path | None = None) -> RecordingSettings:
    return RecordingSettings(
        folder=Path("/traces"),
        config=config,
        kv_watch_every=0,
        capture_bytes=32,
        all_layers="off",
        outputs_every=5,
        sweep_every=7,
        history="off",
        compression="zstd",
        flush_bytes=1000,
        flush_interval_ns=250_000_000,
        max_queued_bytes=64 << 20,
        segment_bytes=1 << 30,
        segment_ns=60_000_000_000,
        keep_segments=3,
        keep_bytes=8 << 30,
        keep_folder_bytes=16 << 30,
        freeze_file=Path("/run/freeze"),
        freeze_signal=int(signal.SIGUSR2),
        tokens="hashed",
        token_salt_file=salt,
        names="hashed",
        fleet="europe",
        server="gpu-17",
        sample_servers=0.01,
        sample_windows=0.005,
        window_seconds=60,
        bytes_a_day=2 << 30,
        oracle="my.module:Mine",
    )


def toml(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in values.items())


def test_every_variable_is_read(salt: Path) -> None:
    environ = {f"KVCANARY_{name.upper()}": f" {value} " for name, value in in_human_units(salt).items()}
    assert set(environ) == set(VARIABLES) - {"KVCANARY_CONFIG"}
    assert read_environment(environ) == as_settings(salt)


@pytest.mark.parametrize("table", ["", "[kvcanary]\n"])
def test_every_key_of_a_file_is_read(tmp_path: Path, salt: Path, table: str) -> None:
    path = tmp_path / "kvcanary.toml"
    path.write_text(table + toml(in_human_units(salt)))
    assert {setting.name for setting in SETTINGS} == set(in_human_units(salt))
    assert is_wanted({"KVCANARY_CONFIG": str(path)})
    assert read_environment({"KVCANARY_CONFIG": str(path)}) == as_settings(salt, path)


def test_variables_go_before_the_file_and_relative_paths_start_at_it(tmp_path: Path) -> None:
    path = tmp_path / "kvcanary.toml"
    path.write_text("[another_tool]\nx = 1\n[kvcanary]\ntrace = 'traces'\nsweep_every = 9\nhistory = 'off'\n")
    settings = read_environment({"KVCANARY_CONFIG": str(path), "KVCANARY_HISTORY": "on", "KVCANARY_SWEEP_EVERY": ""})
    assert settings == RecordingSettings(folder=tmp_path / "traces", config=path, sweep_every=9, history="on")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "kvcanary.toml"
    file.write_text('trace = "~/traces"\n')
    for environ in ({"KVCANARY_TRACE": "~/traces"}, {"KVCANARY_CONFIG": str(file)}):
        settings = read_environment(environ)
        assert settings is not None
        assert settings.folder == tmp_path / "traces"


def test_a_file_that_names_no_folder_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kvcanary.toml"
    path.write_text("sweep_every = 9\n")
    assert read_environment({"KVCANARY_CONFIG": str(path)}) is None
    settings = read_environment({"KVCANARY_CONFIG": str(path), "KVCANARY_TRACE": "/traces"})
    assert settings == RecordingSettings(folder=Path("/traces"), config=path, sweep_every=9)


WRONG = [
    ("kv_watch_every", "-1", "expected a whole number from 0"),
    ("kv_watch_every", "one", "expected a whole number"),
    ("kv_watch_every", "٣", "expected a whole number"),
    ("kv_watch_every", "3 MiB", "expected a whole number"),
    ("capture_bytes", "17", "a multiple of 16"),
    ("capture_bytes", "2MiB", "to 1048576"),
    ("flush_interval_ms", "0", "from 1"),
    ("history", "yes", "expected one of auto, on, off"),
    ("compression", "gzip", "expected one of lz4, zstd, none"),
    ("segment_bytes", "1 MB", "or a number and KiB, MiB or GiB"),
    ("freeze_signal", "KILL", "the name of a signal, one of USR1, USR2"),
    ("oracle", "hash it", "expected hash, or module:name"),
    ("tokens", "none", "expected one of plain, hashed"),
    (
        "keep_segments",
        "2",
        "keep_segments and keep_bytes need segments: set segment_seconds (segment_ns) or segment_bytes too",
    ),
    ("freeze_file", "/f", "freeze_file and freeze_signal need a flight recorder: set keep_segments or keep_bytes too"),
    ("token_salt_file", "/nowhere/salt", "the token salt cannot be read: No such file"),
    ("traces", "/x", "no such setting; there are"),
    ("sample_servers", "0.01", "expected a percentage, as 1% or 0.25%"),
    ("sample_windows", "101%", "expected a percentage, as 1% or 0.25%"),
    ("fleet", "x" * 201, "expected a name of at most 200 characters"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, value: str, expected: str) -> None:
    variable = f"KVCANARY_{name.upper()}"
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        read_environment({"KVCANARY_TRACE": "/traces", variable: value})
    if "need" not in expected and name != "token_salt_file":
        assert str(raised.value).startswith(variable)
    path = tmp_path / "kvcanary.toml"
    path.write_text(toml({name: value}))
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        read_environment({"KVCANARY_TRACE": "/traces", "KVCANARY_CONFIG": str(path)})
    if "need" not in expected and name != "token_salt_file":
        assert str(raised.value).startswith(f"{path}: {name}")


def test_a_misspelt_name_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"KVCANARY_SWEEP_EVRY \(did you mean KVCANARY_SWEEP_EVERY\?\)"):
        read_environment({"KVCANARY_TRACE": "/traces", "KVCANARY_SWEEP_EVRY": "1"})
    path = tmp_path / "kvcanary.toml"
    path.write_text("token = 'hashed'\nKVCANARY_TOKENS = 'hashed'\n")
    with pytest.raises(ValueError, match=r"token \(did you mean tokens\?\), KVCANARY_TOKENS"):
        read_environment({"KVCANARY_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"sweep_every = true", "sweep_every is True, expected a whole number"),
        (b"sweep_every = 1.5", "sweep_every is 1.5, expected a whole number"),
        (b"history = ['on']", "history is ['on'], expected one of"),
        (b"kvcanary = 3", "kvcanary is 3, expected a table"),
        (b"[kvcanary", "not TOML"),
        (b"trace = '\xff'", "not TOML"),
        (b"trace = ''", "trace is '', expected a path"),
        (b'trace = "a\\u0000b"', "expected a path"),
        (None, "the settings cannot be read: No such file"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "kvcanary.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        read_environment({"KVCANARY_CONFIG": str(path)})
    assert str(raised.value).startswith(str(path))


def test_a_short_salt_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "salt").write_text("short\n")
    environ = {"KVCANARY_TRACE": "/traces", "KVCANARY_TOKEN_SALT_FILE": str(tmp_path / "salt")}
    with pytest.raises(ValueError, match="has 5 bytes, expected at least 16 random ones; make one with: openssl"):
        read_environment(environ)


def test_the_writer_gets_its_settings_as_they_are(salt: Path) -> None:
    names = {field.name for field in dataclasses.fields(WriterSettings)}
    assert set(RecordingSettings(folder=Path("/t")).writer_options()) == names
    options = as_settings(salt).writer_options()
    assert set(options) == names | {"privacy"}
    assert all(options[name] == getattr(as_settings(salt), name) for name in names)


def test_the_start_up_line_names_every_setting(salt: Path) -> None:
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=64),), tables=(StateTable(rows=2, width=8),), sweep_interval=5
    )
    settings = dataclasses.replace(as_settings(salt, Path("/etc/k.toml")), kv_watch_every=3)
    line = settings.start_up_line(Path("/t/a.arrow"), header)
    parts = ("/t/a.*.arrow", "full 64 slots", "32 bytes", "KV watch every 3", "sweep every 5", "history off", "zstd")
    parts += (
        "0.25 s or 0 KiB",
        "64 MiB queued",
        "segments of 1024 MiB or 60 s",
        "the last 3 segments and 8192 MiB kept",
        "at most 16384 MiB in the folder at the start",
    )
    parts += ("frozen by /run/freeze or SIGUSR2", "tokens hashed", "names hashed", "settings from /etc/k.toml")
    assert [part for part in parts if part not in line] == []
    assert "\n" not in line
    assert str(salt) not in line
    plain = RecordingSettings(folder=Path("/t")).start_up_line(Path("/t/a.arrow"), header)
    assert "recording to /t/a.arrow (" in plain
    assert "one file; tokens plain, names plain)" in plain


def test_every_setting_is_documented_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(KVCANARY_\w+)` \| ?(.*?) ?\| (.*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE
    )
    documented = {variable: default.strip("`") for variable, default, _ in rows}
    assert len(documented) == len(rows)
    expected = {setting.variable: setting.default for setting in SETTINGS} | {"KVCANARY_CONFIG": ""}
    assert documented == expected
    for _, _, text in rows:
        assert len(text) > 40


def test_the_documented_file_can_be_read(tmp_path: Path) -> None:
    found = re.search(r"```toml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / "k.toml").write_text(found[1])
    (tmp_path / "salt").write_text("f" * 64)
    settings = read_environment({"KVCANARY_CONFIG": str(tmp_path / "k.toml")})
    assert settings is not None
    assert (settings.folder, settings.max_queued_bytes) == (Path("/traces"), 1 << 30)
    assert settings.token_salt_file == tmp_path / "salt"


def test_whether_a_recording_is_wanted_is_found_out_without_weight() -> None:
    code = (
        "import sys; from kvcanary.recorder.process.environment import is_wanted; is_wanted(); "
        "print(sorted({'numpy', 'pyarrow', 'tomllib', 'difflib', 'click'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
@pytest.mark.parametrize("variable", ["KVCANARY_CONFIG", "KVCANARY_TOKEN_SALT_FILE"])
def test_a_file_that_leads_elsewhere_neither_hangs_nor_fills_the_memory(
    tmp_path: Path, variable: str, kind: str
) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"#" * ((1 << 20) + 1))
    expected = {"folder": "Is a directory", "large": "larger than 1048576 bytes"}.get(kind, "not a regular file")
    with pytest.raises(ValueError, match=f"{path}: .* cannot be read: {expected}"):
        read_environment({"KVCANARY_TRACE": "/traces", variable: str(path)})


def test_a_file_of_settings_may_begin_as_windows_begins_it_and_must_not_be_nested_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_bytes(b'\xef\xbb\xbftrace = "t"')
    settings = read_environment({"KVCANARY_CONFIG": str(path)})
    assert settings is not None
    assert settings.folder == tmp_path / "t"
    path.write_text("trace = " + "[" * 100_000)
    with pytest.raises(ValueError, match=f"{path}: not TOML: maximum recursion"):
        read_environment({"KVCANARY_CONFIG": str(path)})


def test_a_folder_is_no_file_to_look_for(tmp_path: Path) -> None:
    environ = {"KVCANARY_TRACE": str(tmp_path), "KVCANARY_SEGMENT_SECONDS": "1", "KVCANARY_KEEP_SEGMENTS": "2"}
    with pytest.raises(ValueError, match=f"freeze_file is {tmp_path}, a folder"):
        read_environment({**environ, "KVCANARY_FREEZE_FILE": str(tmp_path)})


def test_a_relative_folder_stays_where_it_was_when_the_engine_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"KVCANARY_TRACE": "t", "KVCANARY_SEGMENT_SECONDS": "1", "KVCANARY_KEEP_SEGMENTS": "2"}
    settings = read_environment({**environ, "KVCANARY_FREEZE_FILE": "now"})
    assert settings is not None
    assert (settings.folder, settings.freeze_file) == (tmp_path / "t", tmp_path / "now")
