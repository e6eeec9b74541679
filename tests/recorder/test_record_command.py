"""`kvcanary record` with real processes: what it sets, passes on, returns and says."""

import json
import os
import pty
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.process.settings import SETTINGS

KVCANARY = [sys.executable, "-c", "from kvcanary.cli import kvcanary_main; kvcanary_main()"]

# Records the simulated engine as its environment says, then does what it is told.
ENGINE = """
import os, signal, sys, time
from pathlib import Path
from kvcanary.recorder.process.environment import read_environment

def record(name):
    from kvcanary.recorder.engines.simulated.config import EngineConfig
    from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
    from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
    settings = read_environment()
    workload = RandomWorkload(requests=4, prompt_tokens=40, output_tokens=10)
    engine = SimulatedEngine(EngineConfig(), workload, settings.folder / f"{name}.arrow", **settings.writer_options())
    engine.run()
    return engine
"""


@pytest.fixture(autouse=True)
def _no_settings_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVCANARY_")]:
        monkeypatch.delenv(name)


def record_arguments(folder: Path, body: str, *options: str) -> list[str]:
    command = [sys.executable, "-c", ENGINE + body]
    return [
        *KVCANARY,
        "record",
        "-o",
        str(folder / "traces"),
        "--json",
        str(folder / "run.json"),
        *options,
        "--",
        *command,
    ]


def record(
    folder: Path, body: str, *options: str, **run: Any
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = subprocess.run(record_arguments(folder, body, *options), capture_output=True, text=True, check=False, **run)
    return done, json.loads((folder / "run.json").read_text())


def test_what_was_recorded_and_how_to_replay_it(tmp_path: Path) -> None:
    done, told = record(tmp_path, "record('a').close()\nrecord('b').close()\nprint('engine')\nsys.exit(7)\n")
    assert (done.returncode, done.stdout) == (7, "engine\n"), done.stderr
    paths = [tmp_path / "traces" / name for name in ("a.arrow", "b.arrow")]
    assert [trace["path"] for trace in told["traces"]] == [str(path) for path in paths]
    for trace in told["traces"]:
        assert (trace["state"], trace["requests"], trace["lost_events"]) == ("complete", 4, 0)
        assert trace["forwards"] > 10
        assert trace["input_tokens"] > 100
    assert told["replay_command"] == shlex.join(["kvcanary-replay", str(tmp_path / "traces")])
    assert told["advice"] == []
    assert told["exit_code"] == 7
    assert f"recorded in {tmp_path / 'traces'}" in done.stderr
    assert f"next    {told['replay_command']}" in done.stderr
    arguments = shlex.split(told["replay_command"])[1:]
    code = "from kvcanary.cli import replay_main; replay_main()"
    replayed = subprocess.run(
        [sys.executable, "-c", code, "--no-report", "-q", *arguments], capture_output=True, check=False
    )
    assert replayed.returncode == 0, replayed.stderr


def test_options_become_variables_and_go_before_a_file(tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("sweep_every = 5\nhistory = 'on'\n")
    options = ["--config", "k.toml", "--sweep-every", "9", "--segment-seconds", "60", "--keep-segments", "2"]
    options += ["--freeze-file", "freeze", "--freeze-signal", "USR2", "--capture-bytes", "32"]
    body = """
import json
print(json.dumps({n: v for n, v in os.environ.items() if n.startswith('KVCANARY_')}))
print(read_environment())
"""
    done, told = record(tmp_path, body, *options, cwd=tmp_path)
    seen, settings = done.stdout.splitlines()
    variables = json.loads(seen)
    assert len(variables.pop("KVCANARY_RUN_ID")) == 32
    assert variables == {
        "KVCANARY_TRACE": str(tmp_path / "traces"),
        "KVCANARY_CONFIG": str(tmp_path / "k.toml"),
        "KVCANARY_SWEEP_EVERY": "9",
        "KVCANARY_SEGMENT_SECONDS": "60",
        "KVCANARY_KEEP_SEGMENTS": "2",
        "KVCANARY_FREEZE_FILE": str(tmp_path / "freeze"),
        "KVCANARY_FREEZE_SIGNAL": "USR2",
        "KVCANARY_CAPTURE_BYTES": "32",
    }
    assert "sweep_every=9" in settings
    assert "history='on'" in settings
    assert told["traces"] == []


def test_all_processes_of_a_run_share_a_salt_that_is_gone_afterwards(tmp_path: Path) -> None:
    body = """
path = Path(os.environ['KVCANARY_TOKEN_SALT_FILE'])
print(path, oct(path.stat().st_mode))
print(len({read_environment().writer_options()['privacy'].hash_name('r') for _ in range(2)}))
"""
    done, _ = record(tmp_path, body, "--names", "hashed")
    path, mode, different = done.stdout.split()
    assert (mode, different) == ("0o100600", "1")
    assert not Path(path).exists()


def test_segments_are_one_recording_and_frozen_ones_are_named(tmp_path: Path) -> None:
    body = """
engine = record('a')
engine.recorder.outbox.writer.freeze('odd answer')
engine.close()
"""
    options = ("--segment-bytes", "2000", "--keep-segments", "3", "--flush-interval-ms", "1")
    done, told = record(tmp_path, body, *options)
    assert len(told["traces"]) > 1, done.stderr
    assert all(".0000" in trace["path"] for trace in told["traces"])
    shown = [line for line in done.stderr.splitlines() if line.startswith("a.arrow")]
    assert [line.split()[:3] for line in shown] == [["a.arrow", "complete", str(len(told["traces"]))]]
    (frozen,) = told["frozen"]
    assert f"frozen  kvcanary-replay {frozen}" in done.stderr
    assert list(Path(frozen).glob("*.arrow"))


def test_an_engine_that_is_killed_leaves_what_it_flushed(tmp_path: Path) -> None:
    body = "record('a').recorder.outbox.writer.flush()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done, told = record(tmp_path, body)
    assert done.returncode == 128 + signal.SIGKILL
    (trace,) = told["traces"]
    assert trace["state"] == "torn"
    assert trace["forwards"] > 10
    assert (trace["lost_events"], trace["unknown_losses"]) == (0, 0), "what was not flushed is in the tail"
    assert "killed before it could end its trace" in done.stderr
    assert "kvcanary-replay" in told["replay_command"]


def test_what_was_there_before_is_not_this_run_s(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "b.arrow").write_text("no trace")
    _, told = record(tmp_path, "record('c').close()\n")
    assert [Path(trace["path"]).name for trace in told["traces"]] == ["c.arrow"]
    assert told["replay_command"] == f"kvcanary-replay {tmp_path / 'traces' / 'c.arrow'}"
    done, told = record(tmp_path, "(read_environment().folder / 'd.arrow').write_text('no trace either')\n")
    (trace,) = told["traces"]
    assert trace["state"] == "unreadable"
    assert f"error   {trace['error']}" in done.stderr
    assert told["replay_command"] == ""
    assert told["advice"]


WAITS = """
def told(number, frame):
    with open(os.environ['TOLD'], 'a') as out:
        out.write(f'{signal.Signals(number).name} ')
    if number == signal.SIGTERM:
        sys.exit(3)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, told)
engine = record('a')
Path(os.environ['TOLD']).write_text('ready ')
while True:
    time.sleep(0.05)
"""


def wait_for(path: Path, text: str) -> None:
    while not (path.exists() and text in path.read_text()):
        time.sleep(0.02)


def test_signals_reach_the_engine_once_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "told"
    process = subprocess.Popen(
        record_arguments(tmp_path, WAITS),
        env={**os.environ, "TOLD": str(log)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(log, "ready")
    for name in ("INT", "HUP", "TERM"):
        process.send_signal(getattr(signal, f"SIG{name}"))
        wait_for(log, name)
    _, err = process.communicate()
    assert process.returncode == 3, err
    assert log.read_text().split() == ["ready", "SIGINT", "SIGHUP", "SIGTERM"]
    assert json.loads((tmp_path / "run.json").read_text())["traces"][0]["state"] == "complete", "closed by its atexit"


def test_sigterm_reaches_what_a_script_left_behind(tmp_path: Path) -> None:
    log = tmp_path / "told"
    *own, _, python, flag, body = record_arguments(tmp_path, WAITS)
    script = f"{shlex.join([python, flag, body])}; echo never"  # dies of the signal, and does not pass it on
    process = subprocess.Popen([*own, "--", "sh", "-c", script], env={**os.environ, "TOLD": str(log)}, stderr=-1)
    wait_for(log, "ready")
    process.terminate()
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert log.read_text().split() == ["ready", "SIGTERM"]
    assert json.loads((tmp_path / "run.json").read_text())["traces"][0]["state"] == "complete"


TAKE_TERMINAL = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_on_a_terminal_keys_reach_the_engine_once_and_it_can_read(tmp_path: Path) -> None:
    log = tmp_path / "told"
    arguments = record_arguments(tmp_path, "print('asked', input(), flush=True)\n" + WAITS)
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-c", TAKE_TERMINAL, *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TOLD": str(log)}
    )
    os.close(theirs)
    os.write(terminal, b"hello\n")
    wait_for(log, "ready")
    os.write(terminal, b"\x03")
    wait_for(log, "SIGINT")
    os.write(terminal, b"\x1a")  # Ctrl-Z stops both, so that a shell would show its prompt
    while state_of(process.pid) != "T":
        time.sleep(0.02)
    process.send_signal(signal.SIGCONT)
    while os.tcgetpgrp(terminal) == process.pid:
        time.sleep(0.02)
    os.write(terminal, b"\x03")
    wait_for(log, "SIGINT SIGINT")
    process.terminate()
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # how a terminal says that nobody is at its other end
        pass
    os.close(terminal)
    assert process.wait() == 3, shown
    assert log.read_text().split() == ["ready", "SIGINT", "SIGINT", "SIGTERM"]
    assert b"asked hello" in shown
    assert b"kvcanary-replay" in shown


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVCANARY, "record", *arguments], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "traces", "--", "no-such-engine"], "no-such-engine: cannot be started: No such file or directory"),
        (["-o", "traces", "--", "./text"], "./text: cannot be started: Permission denied"),
        (["-o", "text/traces", "--", "true"], "text/traces: Not a directory"),
        (["-o", "text", "--", "true"], "text: is a file, expected a folder for the traces; name another"),
        (["--", "true"], "no folder for the traces: name one with -o"),
        (["-o", "traces", "--json", "nowhere/run.json", "true"], "nowhere/run.json: No such file"),
        (["-o", "traces", "--sweep-every", "x", "true"], "--sweep-every is 'x', expected a whole number"),
        (["-o", "traces", "--keep-segments", "3", "true"], "need segments"),
        (["-o", "traces", "--config", "nowhere.toml", "true"], "the settings cannot be read"),
        (["-o", "traces"], "Missing argument 'COMMAND...'"),
    ],
)
def test_what_cannot_be_done_ends_with_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "text").write_text("")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_may_not_be_written_is_named_before_the_engine_runs(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        folder = Path("/proc/1/task")  # root may write anywhere else
    else:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o500)
    done = run("-o", str(folder), "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 2, done.stderr
    assert str(folder) in done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_help_names_every_setting() -> None:
    shown = run("--help").stdout
    assert [setting.option for setting in SETTINGS if setting.name != "trace" and setting.option not in shown] == []


def test_what_cannot_be_written_to_is_known_before_the_engine_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    options = ["record", "-o", str(tmp_path / "traces"), "--json", str(tmp_path)]
    done = subprocess.run([*KVCANARY, *options, "--", "touch", str(ran)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"Error: {tmp_path}: Is a directory\n"
    assert not ran.exists()


def test_a_full_disk_for_the_json_hides_no_exit_code(tmp_path: Path) -> None:
    for exit_code, expected in ((5, 5), (0, 2)):
        options = ["record", "-o", str(tmp_path / "traces"), "--json", "/dev/full"]
        done = subprocess.run(
            [*KVCANARY, *options, "--", "sh", "-c", f"exit {exit_code}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expected
        assert "Error: /dev/full: No space left on device" in done.stderr


def test_the_salt_is_gone_however_the_command_ends_and_its_json_is_private(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    body = "print(os.environ['KVCANARY_TOKEN_SALT_FILE'], flush=True); time.sleep(20)"
    told = tmp_path / "told.json"
    mask = os.umask(0)
    arguments = record_arguments(tmp_path / "traces", body, "--tokens", "hashed", "--json", str(told))
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    os.umask(mask)
    assert process.stdout is not None
    with process.stdout:
        salt = Path(process.stdout.readline().strip())
        assert stat.S_IMODE(salt.stat().st_mode) == 0o600
        assert stat.S_IMODE(told.stat().st_mode) == 0o600
        process.kill()
        process.wait()
    while salt.exists():
        time.sleep(0.05)
