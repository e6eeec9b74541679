"""What ends a replay from outside, in any number and order: the report is there, and says that it was interrupted."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.recorder.cli.simulate import simulate_command
from kvcanary.recorder.process.endings import ENDINGS, endings_deferred

REPLAY = [sys.executable, "-c", "from kvcanary.cli import replay_main; replay_main()"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("signals") / "trace.arrow"
    words = ["-o", str(path), "--requests", "300", "--prompt-tokens", "400", "--output-tokens", "100"]
    assert CliRunner().invoke(simulate_command, words).exit_code == 0
    return path


@pytest.mark.parametrize("numbers", [[signal.SIGTERM] * 2, [signal.SIGINT] * 2, [*ENDINGS, signal.SIGINT]])
@pytest.mark.parametrize("apart", [0.0, 0.01])
@pytest.mark.one_in(3)
def test_several_signals_at_once_lose_no_report(trace, tmp_path, numbers, apart):
    report = tmp_path / "trace.report"
    words = ["--executor", "stepwise", "--report", str(report), str(trace)]
    process = subprocess.Popen([*REPLAY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (report / "violations.parquet").exists():
        assert process.poll() is None
        time.sleep(0.01)
    for number in numbers:
        process.send_signal(number)
        time.sleep(apart)
    out, error = process.communicate()
    assert "internal error" not in error
    assert "Traceback" not in error
    assert process.returncode in {125, *(128 + number for number in numbers)}, (out, error)
    if process.returncode == 125:
        summary = json.loads((report / "summary.json").read_text())
        assert summary["stopped"].startswith("interrupted after")
        assert {path.name for path in report.iterdir()} >= {"violations.parquet", "findings.parquet"}


def test_what_is_being_written_is_written_to_its_end():
    done = []
    with pytest.raises(KeyboardInterrupt), endings_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("whole")
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_goes_before_a_signal():
    with pytest.raises(OSError, match="full"), endings_deferred():
        signal.raise_signal(signal.SIGINT)
        raise OSError("full")


def test_once_the_exit_code_stands_no_signal_replaces_it(trace):
    late = "import atexit, os, signal; atexit.register(lambda: [os.kill(os.getpid(), n) for n in (1, 2, 15)])"
    words = [sys.executable, "-c", f"{late}; from kvcanary.cli import kvcanary_main; kvcanary_main()", "inspect"]
    ended = subprocess.run([*words, str(trace)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
