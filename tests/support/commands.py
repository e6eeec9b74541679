"""Commands as a user meets them, run in this process: a dozen libraries are loaded once, not for each test."""

from dataclasses import dataclass

from click.testing import CliRunner, Result
from kvcanary.cli import main
from kvcanary.replayer.cli.replay import replay_command


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str
    raw: bytes


def run(*arguments: object, stdin: str = "") -> Done:
    """Run `kvcanary` with these arguments."""
    result = CliRunner().invoke(main, [*map(str, arguments)], input=stdin, catch_exceptions=False, prog_name="kvcanary")
    raw = result.stdout_bytes
    return Done(result.exit_code, raw.decode("utf-8", "replace"), result.stderr, raw)


def run_replay(*arguments: object) -> Result:
    """Run `kvcanary-replay` with these arguments."""
    result = CliRunner().invoke(replay_command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result
