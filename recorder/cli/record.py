"""`kvcanary record`: run an engine with the recorder on, and say what came of it."""

import json
import os
import shlex
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..errors import printable
from ..process.settings import FOLDER, PREFIX, SETTINGS
from ..text_tables import show_columns
from .program import GivenPath, console_for, fail

if TYPE_CHECKING:
    from rich.console import Console

    from ..process.recorded_files import RecordedTrace

GROUP_PATIENCE_S: Final = 10.0  # for processes that the engine leaves behind, which may still end their traces

# (prints a line), what was recorded, the engine's exit code -> the exit code, more for the JSON
Behind = Callable[[Callable[[str], None], "list[RecordedTrace]", int], tuple[int, dict[str, Any]]]

_COUNTED: Final = ("forwards", "requests", "input_tokens", "sampled_tokens")
_FROM_BEST_TO_WORST: Final = ("complete", "lossy", "torn", "damaged", "unreadable")

_EPILOG = """\b
Examples:
  kvcanary record -o traces -- python -m sglang.launch_server --model-path ...
  kvcanary record -o traces --segment-seconds 60 --keep-segments 10 -- vllm serve ...
      a flight recorder: the last ten minutes stay
  kvcanary record -o traces --tokens hashed --json run.json -- ./serve.sh

Ctrl-C and SIGTERM go to the engine. The exit code is the engine's; 2 if it could not be started.
"""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting of a recording."""
    for setting in reversed([setting for setting in SETTINGS if setting is not FOLDER]):
        default = f" [default: {setting.default}]" if setting.default else ""
        kind = (
            "|".join(setting.words)
            if setting.words
            else {"path": "PATH", "bytes": "BYTES", "oracle": "hash|MODULE:NAME"}.get(setting.kind, "N")
        )
        command = click.option(setting.option, setting.name, metavar=kind, help=setting.help + default)(command)
    return command


@click.command("record", epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True)
@click.option("-o", "--output", type=GivenPath(), help="Folder for the traces. [default: KVCANARY_TRACE's]")
@click.option("--config", type=GivenPath(), help="TOML file of settings; options go before it.")
@click.option("--json", "json_path", type=GivenPath(), help="Also write what was recorded to this file.")
@with_settings
def record_command(
    command: tuple[str, ...], output: Path | None, config: Path | None, json_path: Path | None, **options: str | None
) -> None:
    """Run COMMAND, an engine's server, with the recorder on, and say what was recorded when it ends.

    The same as setting KVCANARY_TRACE and the other variables of docs/guide/production.md, which the options are named after.
    """
    record_run(command, output, config, json_path, options)


def record_run(
    command: tuple[str, ...],
    output: Path | None,
    config: Path | None,
    json_path: Path | None,
    options: dict[str, str | None],
    *,
    inject: str = "",
    behind: Behind | None = None,
) -> None:
    """Run a command with the recorder on and exit as it does; `inject` is what a fault's variable holds, "" for none.

    `behind` is called at the end with what was recorded and the exit code; it returns another, and what the JSON says too.
    """
    from ..process.environment import read_environment
    from ..process.injection import INJECT

    try:
        environ = _environ(output, config, options)
        environ |= {INJECT: inject} if inject else {}
        settings = read_environment(environ)
        if settings is not None:
            settings.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=settings.folder):  # a trace can be made in it
                pass
        if json_path is not None:  # known before an engine has run for hours
            os.close(_open_private(json_path, emptied=False))
    except FileExistsError as error:
        fail(f"{error.filename}: is a file, expected a folder for the traces; name another")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        fail(str(error))
    if settings is None:
        fail("no folder for the traces: name one with -o")
    shared_salt = settings.tokens == "hashed" or settings.names == "hashed"
    if shared_salt and settings.token_salt_file is None:
        environ[PREFIX + "TOKEN_SALT_FILE"] = _salt_in_memory()
    _run(command, environ, settings.folder, json_path, behind)


def _environ(output: Path | None, config: Path | None, options: dict[str, str | None]) -> dict[str, str]:
    """Return the engine's environment: this one, and what the options say; raise `ValueError` for one that cannot be."""
    from ..process.environment import give_run_id

    environ = dict(os.environ)
    give_run_id(environ)
    given = options if output is None else {**options, FOLDER.name: str(output)}
    for setting in SETTINGS:
        text = given.get(setting.name)
        if text is None:
            continue
        value = setting.parse(text, "-o" if setting is FOLDER else setting.option)
        # The engine may go to another folder before it reads this.
        environ[setting.variable] = str(value.absolute()) if isinstance(value, Path) else text
    if config is not None:
        environ[PREFIX + "CONFIG"] = str(config.absolute())
    return environ


def _open_private(path: Path, *, emptied: bool) -> int:
    """Open a file for writing that only this user can read: a command line may hold keys. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
        if emptied:
            os.ftruncate(descriptor, 0)
    return descriptor


def _salt_in_memory() -> str:
    """Return the path of a fresh salt, for all processes of this run and nobody else: no disk has it, and it is gone
    with this process, however that ends.
    """
    from ..capture.privacy import new_salt

    file = os.memfd_create("kvcanary-salt")
    os.fchmod(file, 0o600)
    os.write(file, new_salt().hex().encode("ascii"))
    return f"/proc/{os.getpid()}/fd/{file}"


def _run(
    command: Sequence[str], environ: dict[str, str], folder: Path, json_path: Path | None, behind: Behind | None
) -> None:
    from ..process.child import run_child, wait_for_group
    from ..process.recorded_files import changed, read_recorded, replay_command, stamps, why_nothing

    before, begin = stamps(folder), time.monotonic()
    try:
        code, group = run_child(command, environ)
    except OSError as error:
        fail(f"{command[0]}: cannot be started: {error.strerror}")
    seconds = time.monotonic() - begin
    console = console_for(sys.stderr)
    with console.status("waiting for the engine's processes") as status:
        gone = wait_for_group(group, GROUP_PATIENCE_S)
        paths, frozen = changed(folder, before)
        found = read_recorded(paths, lambda path: status.update(f"reading {path.name}"))
    recorded = any(trace.forwards for trace in found)
    advice = [] if recorded else why_nothing(command, environ)
    if not gone:
        console.print(f"note    processes of the engine still run after {GROUP_PATIENCE_S:g} s; their traces may go on")
    _show(console, found, advice, folder)
    for copy in frozen:
        _say(console, f"frozen  {shlex.join(['kvcanary-replay', str(copy)])}")
    more: dict[str, Any] = {}
    if behind is not None:
        code, more = behind(lambda text: _say(console, text), found, code)
    if json_path is not None:
        report = {
            "command": list(command),
            "exit_code": code,
            "seconds": seconds,
            "folder": str(folder),
            "processes_left": not gone,
            "frozen": [str(copy) for copy in frozen],
            "traces": [trace.to_json() for trace in found],
            "replay_command": replay_command(found),
            "advice": advice,
            **more,
        }
        try:
            with os.fdopen(_open_private(json_path, emptied=True), "w", encoding="utf-8") as file:
                file.write(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            fail(f"{json_path}: {error.strerror}", code or 2)
    sys.exit(code)


def _say(console: "Console", text: str) -> None:
    from rich.markup import escape

    console.print(escape(printable(text)), soft_wrap=True)


def _show(console: "Console", found: "list[RecordedTrace]", advice: list[str], folder: Path) -> None:
    from ..process.recorded_files import replay_command

    if found:
        _say(console, f"recorded in {folder}")
        _show_table(console, found)
    lines = [f"error   {trace.error}" for trace in found if trace.error]
    if any(trace.state == "torn" for trace in found):
        lines.append(
            "torn    a process was killed before it could end its trace: what was flushed is there, and is judged"
        )
    if advice:
        lines.append("no forward was recorded" if found else f"nothing was recorded in {folder}")
        lines += [f"why     {reason}" for reason in advice]
    else:
        lines.append(f"next    {replay_command(found)}")
    for line in lines:
        _say(console, line)


def _show_table(console: "Console", found: "list[RecordedTrace]") -> None:
    from ..process.recorded_files import by_recording

    rows = []
    for name, traces in by_recording(found).items():
        counts = [sum(getattr(trace, field) for trace in traces) for field in _COUNTED]
        lost = f"{sum(trace.lost_events for trace in traces):,}"
        rows.append(
            (
                *(name, max((trace.state for trace in traces), key=_FROM_BEST_TO_WORST.index), f"{len(traces):,}"),
                *(f"{count:,}" for count in counts),
                f"{lost} and more" if any(trace.unknown_losses for trace in traces) else lost,
                f"{sum(trace.size_bytes for trace in traces) / 1e6:,.1f}",
            )
        )
    numbers = ("files", "forwards", "requests", "tokens in", "sampled", "lost", "MB")
    show_columns(console, rows, ("trace", "state", *numbers), right=numbers)
