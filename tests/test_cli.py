"""The command line as a whole: --help is light, completion works, a CPU replay never loads torch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from .support.commands import run

HEAVY = {"torch", "triton", "numba", "polars", "duckdb", "pyarrow", "numpy", "rich", "importlib.metadata"}


def modules_after(code: str) -> set[str]:
    script = f"import sys\ntry:\n {code}\nexcept SystemExit:\n pass\nprint('MODULES', *sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split("MODULES", 1)[1].split())


@pytest.mark.parametrize(
    "arguments",
    [
        "main(['--help'])",
        "main(['replay', '--help'])",
        "main(['inspect', '--help'])",
        "main(['recover', '--help'])",
        "main(['simulate', '--help'])",
        "main(['lab', 'matrix', '--help'])",
        "main(['sql', '--help'])",
        "main(['triage', '--help'])",
        "main(['diff', '--help'])",
        "main(['incidents', '--help'])",
        "main(['page', '--help'])",
        "main(['bisect', '--help'])",
        "main(['bisect', 'run', '--help'])",
        "replay_command(['--help'])",
        "main(['replay', '--help'])",
    ],
)
def test_help_loads_no_heavy_library(arguments: str) -> None:
    imports = "from kvcanary.cli import main; from kvcanary.replayer.cli.replay import replay_command; "
    loaded = modules_after(imports + arguments)
    assert "kvcanary.cli" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize(("program", "entry"), [("kvcanary", "kvcanary_main"), ("kvcanary-replay", "replay_main")])
def test_each_program_says_its_version(program: str, entry: str) -> None:
    from importlib.metadata import version

    code = f"import sys; sys.argv = ['x', '--version']; from kvcanary.cli import {entry}; {entry}()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{program}, version {version('kvcanary')}\n"


def test_the_package_runs_as_a_module_from_any_folder(tmp_path: Path) -> None:
    for arguments, expected in (
        (["--help"], "Usage: kvcanary [OPTIONS]"),
        (["replay", "-h"], "Usage: kvcanary replay"),
    ):
        command = [sys.executable, "-P", "-m", "kvcanary", *arguments]
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
        assert said.startswith(expected)


def test_an_interrupt_while_options_are_read_is_no_verdict() -> None:
    code = (
        "import sys; sys.argv = ['x', 'trace.arrow']; from kvcanary.cli import replay_main; "
        "import kvcanary.replayer.cli.replay as replay\n"
        "def interrupted(*_): raise KeyboardInterrupt\n"
        "replay.device_names = interrupted; replay_main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("name", ["click", "rich"])
def test_an_interrupt_while_the_program_loads_leaves_no_traceback(name: str) -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        " def find_spec(self, found, *_):\n"
        f"  if found == {name!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['x', 'trace.arrow']; from kvcanary.cli import replay_main; replay_main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and "Traceback" not in done.stderr


def test_every_command_has_help_with_an_example() -> None:
    from kvcanary.cli import main

    for command in main.list_commands(click.Context(main)):
        if command == "lab":  # its subcommands have them
            continue
        result = run(command, "--help")  # a process for each: test_help_loads_no_heavy_library
        assert result.returncode == 0, command
        assert "Example" in result.stdout, command
        assert "\\b" not in result.stdout, command


def test_the_first_help_shows_the_way_line_by_line() -> None:
    code = "from kvcanary.cli import main; main(['--help'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "  kvcanary-replay trace.arrow        rebuild the pools" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_both_programs(shell: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"from kvcanary.cli import main; main(['completion', '{shell}'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "kvcanary-replay" in result.stdout
    assert "_KVCANARY_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("words", "incomplete", "wanted"),
    [
        ([], "in", {"incidents", "inject", "inspect"}),
        (["bisect"], "--in", {"--incident"}),
        (["bisect", "a.arrow"], "--vo", {"--vote"}),
        (["bisect"], "r", {"reset", "run"}),
        (["bisect"], "t", {"t"}),  # a file: the shell finds those
        (["diff", "--align"], "pr", {"prompt"}),
    ],
)
def test_completion_knows_commands_options_and_choices(words: list[str], incomplete: str, wanted: set[str]) -> None:
    from click.shell_completion import ShellComplete
    from kvcanary.cli import main

    completer = ShellComplete(main, {}, "kvcanary", "_KVCANARY_COMPLETE")
    assert {item.value for item in completer.get_completions(words, incomplete)} == wanted


def test_bash_completes_a_command_of_a_command() -> None:
    script = 'eval "$(kvcanary completion bash)"; COMP_WORDS=(kvcanary bisect re); COMP_CWORD=2; '
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script + '_kvcanary_completion kvcanary; echo "${COMPREPLY[@]}"'],
        capture_output=True, text=True, check=True, env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("reset\n", "")


def test_wrong_usage_exits_2() -> None:
    for arguments in ("['nonsense']", "['replay']", "['replay', '--backend', 'gpu', 'x']"):
        result = subprocess.run(
            [sys.executable, "-c", f"from kvcanary.cli import main; main({arguments})"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("typed", "meant"), [("replya", " Did you mean replay?"), ("traige", " Did you mean triage?"), ("xyz", "")]
)
def test_a_mistyped_command_is_answered_with_the_one_that_was_meant(typed: str, meant: str) -> None:
    done = run(typed)
    assert done.returncode == 2
    assert done.stderr.endswith(f"Error: No such command '{typed}'.{meant}\n")


@pytest.mark.parametrize("command", [["replay", "x.arrow"], ["sql", "x.arrow", "from events"], ["watch", "."]])
def test_what_an_engine_s_environment_lacks_is_named(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "duckdb" else found(name, *rest)
    )
    done = run(*command)
    assert done.returncode == 2
    assert done.stderr.endswith(" needs DuckDB, which recording does without: pip install 'kvcanary[replay]'\n")
    assert run("inspect", "x.arrow").stderr == "Error: x.arrow: no such file\n"
