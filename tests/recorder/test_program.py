"""Commands as programs, in a process of their own: full disks, readers that leave, odd locales, Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvcanary.recorder.cli import program
from kvcanary.recorder.errors import printable_message

START = """
import click, os, sys
from kvcanary.recorder.cli.program import run_program
"""
INSPECT = START + "from kvcanary.recorder.cli.inspect import inspect_command as command\n"
RUN = "run_program(command, 'kvcanary inspect')\n"


def start(code, *arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, **pipes)


def own(body):
    """A command with this body."""
    return f"{START}\n@click.command()\ndef command():\n    {body}\n{RUN}"


def test_messages_of_several_lines():
    assert printable_message("first\x1b[2J\nnext    rm -rf\r") == "first\\x1b[2J\n  next    rm -rf\\r"


def test_a_reader_that_leaves_is_no_verdict(traces):
    path = traces.write()
    for arguments in ([path], [path, "--json"]):
        read, write = os.pipe()
        os.close(read)
        process = start(INSPECT + RUN, *arguments, stdout=write)
        os.close(write)
        assert process.communicate()[1] == ""
        assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_the_output(traces):
    path = traces.write()
    for arguments in ([path], [path, "--json"]):
        with Path("/dev/full").open("w") as full:
            process = start(INSPECT + RUN, *arguments, stdout=full)
            err = process.communicate()[1]
        assert process.returncode == 2
        assert err.splitlines() == [
            "kvcanary inspect: No space left on device",
            "the disk is full; make room, then run the same command again",
        ]


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_changes_nothing(traces, closed):
    code = f'exec {sys.executable} -c "$0" "$1" {closed}>&-'
    process = subprocess.run(["bash", "-c", code, INSPECT + RUN, traces.write()], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert bool(process.stdout) == (closed == 2)


def test_any_name_in_any_locale(traces):
    path = traces.write().rename(traces.folder / os.fsdecode(b"\xc3\xa9\xff.arrow"))
    for settings in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        process = start(INSPECT + RUN, path, env={**os.environ, **settings})
        out, err = process.communicate()
        assert (process.returncode, err) == (0, ""), settings
        assert "\\udcff.arrow" in out


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_command_is_no_verdict_and_leaves_nothing_behind(sent, tmp_path):
    body = f"import pathlib, tempfile, time\n    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}): print('ready', flush=True); time.sleep(60)"  # fmt: skip
    process = start(own(body))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    err = process.communicate()[1]
    assert process.returncode == 128 + sent
    assert err == "interrupted\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_more_changes_nothing_and_is_no_traceback(sent):
    body = "import atexit, time; atexit.register(time.sleep, 1); print('ready', flush=True); time.sleep(60)"
    process = start(own(body))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    assert process.stderr.readline() == "interrupted\n"
    process.send_signal(sent)
    assert process.communicate()[1] == ""
    assert process.returncode == 128 + sent


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_interrupt_that_cannot_be_told_is_no_verdict():
    with Path("/dev/full").open("w") as full:
        process = start(own("print('ready', flush=True); import time; time.sleep(60)"), stderr=full)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.communicate()
    assert process.returncode == 128 + signal.SIGHUP


def test_a_closed_terminal_ends_nothing_that_was_told_to_go_on():
    process = start(own("print('ready', flush=True); import time; time.sleep(1)"), preexec_fn=ignore_hangups)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 0


def ignore_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_what_nobody_foresaw_is_one_line_and_no_verdict():
    process = start(own("{}['\\x1b[31mx']"))
    err = process.communicate()[1]
    assert process.returncode == 2
    assert err.startswith("kvcanary inspect: internal error: KeyError: ") and err.count("\n") == 1
    assert "(<string>:" in err and "\x1b" not in err


def test_a_query_that_is_interrupted_is_no_error():
    process = start(own("raise RuntimeError('Query interrupted')"))
    assert process.communicate()[1] == "interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize("code", [0, 1, 2, 125])
def test_a_commands_own_code_goes_through(code):
    process = start(own(f"sys.exit({code})"))
    process.communicate()
    assert process.returncode == code


def test_a_library_that_does_not_fit_the_address_space_is_named_with_the_way_out(monkeypatch, capsys):
    said = "Could not find/load shared object file 'libllvmlite.so' from resource location: 'llvmlite.binding'."
    monkeypatch.setattr(program.resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    assert program._report_error("kvcanary", OSError(said)) == 2
    error = capsys.readouterr().err
    assert "no room to load libllvmlite.so" in error and "1,024 MiB" in error and "ulimit -v unlimited" in error
    monkeypatch.setattr(program.resource, "getrlimit", lambda _: (program.resource.RLIM_INFINITY,) * 2)
    program._report_error("kvcanary", OSError(said))
    assert "address space" not in capsys.readouterr().err
