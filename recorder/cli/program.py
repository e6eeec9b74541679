"""Running a command as a program: whatever fails outside, no traceback, and no exit code that is a verdict."""

import contextlib
import errno
import gc
import io
import itertools
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import click

from ..errors import error_text, printable, printable_message
from ..process.endings import ENDINGS, ignore_endings
from ..remote import RemotePath, as_path

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED: Final = 2
PIPE_WIDTH: Final = 160
QUERY_INTERRUPTED: Final = "Query interrupted"  # DuckDB's RuntimeError for Ctrl-C while it computes
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE, what a shell shows of any other program whose reader left

# What libraries make while they are imported stays until the end: looking at it again and again takes a tenth of a
# short command's time.
_OBJECTS_WHILE_LOADING: Final = 400_000
_COLLECTOR: Final = gc.get_threshold()

_interrupted_by: int = signal.SIGINT  # the exit code is 128 more: above 127, so that `git bisect run` stops
_interrupted_at: float | None = None
_SAME_WISH_SECONDS: Final = 1.0


class CommandError(click.ClickException):
    """What ends a command, with its exit code; `facts` are what else `--json` says of it."""

    def __init__(self, message: str, code: int = EXIT_FAILED, **facts: object) -> None:
        super().__init__(printable_message(message))
        self.exit_code = code  # type: ignore[misc]  # click's own commands have one for all of a class
        self.facts = facts


class JsonErrors(click.Command):
    """A command of which `--json` prints one document, whatever happens: of an error, what is wrong and what to do."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command, as click does."""
        global _json_asked
        _json_asked = _asks_for_json(list(sys.argv[1:] if args is None else args))
        if not (standalone_mode and _json_asked):
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            error.show()
            _print_error(error.format_message(), _help_of(error), **getattr(error, "facts", {}))
            sys.exit(error.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


def _asks_for_json(words: Sequence[str]) -> bool:
    if words[:1] in (["record"], ["inject"]):  # which have a name of a file behind it
        return False
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own or ("--format", "json") in itertools.pairwise(own) or "--format=json" in own


def error_facts(message: str) -> dict[str, str]:
    """Return what `--json` says of an error: the message, and the part of it that says what to do, if there is one."""
    return {"error": message, "hint": message.rpartition("; ")[2] if "; " in message else ""}


def _help_of(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{context.command_path} --help" if context is not None else ""


def _print_error(message: str, hint: str = "", **facts: object) -> None:
    said = error_facts(message)
    click.echo(json.dumps({**said, "hint": said["hint"] or hint, **facts}, indent=2))


_json_asked: bool = False  # by the words of the command that runs


def run_program(command: click.Command, program: str) -> None:
    """Run `command` with the process's arguments and exit; 1 and 125 come from the command alone.

    SIGTERM and a closed terminal end it as Ctrl-C does. Exits with 130 after that (143, 129), with 141 when whoever read
    the output has left, and with 2 when the output cannot be written or an error comes that no code expects.
    """
    _make_streams_safe()
    for number in ENDINGS:  # what the caller has us ignore (nohup) stays ignored
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)
    gc.set_threshold(_OBJECTS_WHILE_LOADING, *_COLLECTOR[1:])
    invoke, make_context = command.invoke, command.make_context

    # Options are looked at before anything runs, which may load libraries; click would end an interrupt there with 1.
    def parsed(*args: Any, **named: Any) -> click.Context:
        try:
            return make_context(*args, **named)
        except KeyboardInterrupt:
            raise SystemExit(_interrupted()) from None

    # Around `invoke`, not `main`: click itself would end an interrupt and a broken pipe with 1.
    def guarded(context: click.Context) -> Any:
        try:
            try:
                return invoke(context)
            finally:
                sys.stdout.flush()
                # Spares the interpreter its last look at all that was imported, a fifth of a short replay. DuckDB prints what it
                # takes for leaks if its classes outlive that look.
                if "duckdb" not in sys.modules:
                    gc.freeze()
                ignore_endings()  # the exit code stands: a signal in the interpreter's own end would replace it
        except (click.ClickException, click.exceptions.Exit):
            raise
        except SystemExit as end:
            if not isinstance(end.__context__, BrokenPipeError):  # which rich turns into an exit
                raise
            _drop_output()
            raise SystemExit(EXIT_BROKEN_PIPE) from None
        except (KeyboardInterrupt, click.Abort):
            raise SystemExit(_interrupted()) from None
        except Exception as error:  # noqa: BLE001  # the last resort: its message without the traceback
            raise SystemExit(_report_error(program, error)) from None

    command.invoke = guarded  # type: ignore[assignment, method-assign]  # of this one object
    command.make_context = parsed  # type: ignore[method-assign]  # as above
    command.main(prog_name=program)


def _interrupt(number: int, _: object) -> None:
    """End what is under way as Ctrl-C does: what it leaves behind is cleared away, a replay judges as far as it came.

    One that comes right behind another says the same once more, as `timeout` does, which asks the process and its group:
    it must not end the clearing away.
    """
    global _interrupted_by, _interrupted_at
    now = time.monotonic()
    if _interrupted_at is not None and now - _interrupted_at < _SAME_WISH_SECONDS:
        return
    _interrupted_by, _interrupted_at = number, now
    raise KeyboardInterrupt


def _interrupted() -> int:
    """Say so, and return the exit code; one more Ctrl-C is ignored, since nothing is left but to clear away."""
    ignore_endings()
    _say("interrupted")
    return 128 + _interrupted_by


def loaded() -> None:
    """Say that a program's libraries are loaded: the collector leaves them alone, and looks as often as ever at the rest.

    For commands that go on for long; does nothing if no program runs, as in a test.
    """
    if gc.get_threshold()[0] == _OBJECTS_WHILE_LOADING:
        gc.freeze()
        gc.set_threshold(*_COLLECTOR)


def _report_error(program: str, error: Exception) -> int:
    if isinstance(error, RuntimeError) and str(error) == QUERY_INTERRUPTED:
        return _interrupted()
    said = unforeseen(error)
    if short := _too_little_to_load(error):
        said, error = short, MemoryError()
    elif isinstance(error, OSError):
        _drop_output()
        said = f"{error.filename}: {error.strerror or error}" if error.filename else f"{error.strerror or error}"
    elif isinstance(error, MemoryError):
        said = f"there is not enough memory ({error_text(error)}); run it where more is free"
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    _say(f"{program}: {said}")
    if _json_asked and not isinstance(error, OSError):  # behind which part of a document may have been written
        _print_error(said)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _say("the disk is full; make room, then run the same command again")
    return EXIT_FAILED


def _too_little_to_load(error: Exception) -> str:
    """Say so if a library cannot be loaded where the address space is limited, which loaders name in their own words or not at all."""
    loads = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None)
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not loads or "shared object" not in str(error) or most == resource.RLIM_INFINITY:
        return ""
    library = re.search(r"[\w.+-]+\.so[\w.]*", str(error))
    what = library[0] if library else "a library"
    return f"there is no room to load {what}: the address space is limited to {most >> 20:,} MiB; lift that with ulimit -v unlimited"


def unforeseen(error: Exception) -> str:
    """Return an error that no code expects, and its place, in a line."""
    places = traceback.extract_tb(error.__traceback__)
    place = f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else "unknown"
    return f"internal error: {type(error).__name__}: {error} ({place}); please report it"


def _make_streams_safe() -> None:
    """Any name can be printed in any locale, and a closed stream takes what is printed to it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is buffered still can never be written; without this the interpreter says so once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody is there to read it: the exit code says it too
        click.echo(printable(line), err=True)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """End the command with one clear error."""
    raise CommandError(message, code)


def console_for(stream: TextIO) -> "Console":
    """Return a console on a stream; a pipe has no width of its own, and lines must not be cut at 80 columns there."""
    from rich.console import Console

    return Console(file=stream, emoji=False, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


def terminal_width() -> int | None:
    """Return how wide the terminal is that standard output goes to, None for a pipe."""
    return console_for(sys.stdout).width if sys.stdout.isatty() else None


class GivenPath(click.Path):
    """A `pathlib.Path` that is not empty: an empty one would stand for the folder one is in; with `url` also a URL."""

    def __init__(self, *, url: bool = False, **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self._url = url

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; an empty name ends the command."""
        if value == "":
            self.fail("the name is empty; is a variable of the shell unset?", param, ctx)
        if value == "-" and not self.allow_dash:
            self.fail("standard input and output have no name here; a file that is called - is ./-", param, ctx)
        if isinstance(found := as_path(value), RemotePath):
            if not self._url:
                self.fail(f"{value} is a URL, expected a local name; `kvcanary ship` copies files to URLs", param, ctx)
            return found
        return super().convert(found, param, ctx)
