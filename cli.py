"""The command line: `kvcanary COMMAND` and `kvcanary-replay`.

A command's module is imported when the command is named, and heavy libraries inside the command, so that `--help`
answers at once.
"""

from importlib import import_module
from typing import Final

try:
    import click

    from .recorder.cli.program import JsonErrors, fail, run_program
except KeyboardInterrupt:  # before anything is there that could say more
    raise SystemExit(130) from None

# command: (module below this package, name of the click command in it, the line that --help shows)
_COMMANDS: Final = {
    "bisect": ("analysis.cli.bisect", "bisect_command", "Find the engine version that brought a fault."),
    "check-adapter": (
        "replayer.cli.check_adapter",
        "check_adapter_command",
        "Try an adapter: healthy runs, faults, what it does not record.",
    ),
    "collect": ("analysis.cli.collect", "collect_command", "Put reports into one table of a fleet."),
    "diff": ("analysis.cli.diff", "diff_command", "Compare two traces of the same workload."),
    "expand": ("analysis.cli.expand", "expand_command", "Write merged violations as one row a forward."),
    "export": ("analysis.cli.export", "export_command", "Write traces for Perfetto's UI."),
    "fleet": ("analysis.cli.fleet", "fleet_command", "Replay all recordings of a fleet, and show its table as a page."),
    "hunt": ("analysis.cli.hunt", "hunt_command", "Ask a real engine generated requests until something is wrong."),
    "incidents": ("analysis.cli.incidents", "incidents_command", "Show a report's incidents and why they are."),
    "inject": ("recorder.cli.inject", "inject_command", "Record an engine and damage it once, on purpose."),
    "inspect": ("recorder.cli.inspect", "inspect_command", "Show what a trace holds, and what it lost."),
    "lab": ("replayer.cli.lab", "lab_command", "Break an engine on purpose, and see what is noticed."),
    "page": ("analysis.cli.page", "page_command", "Make one HTML page of a report, to look at."),
    "record": ("recorder.cli.record", "record_command", "Run an engine with the recorder on."),
    "recover": ("recorder.cli.recover", "recover_command", "Rewrite what is whole of a torn trace."),
    "replay": ("", "", "Replay traces and judge them (kvcanary-replay)."),
    "ship": ("recorder.cli.ship", "ship_command", "Move finished traces to an object store."),
    "report": ("analysis.cli.report", "report_command", "Write an incident as Markdown for an issue tracker."),
    "rerun": ("replayer.cli.rerun", "rerun_command", "Compute a request again, and say what is at fault."),
    "shrink": ("analysis.cli.shrink", "shrink_command", "Cut a trace down to what shows one incident, for an issue."),
    "simulate": ("recorder.cli.simulate", "simulate_command", "Record a trace from the simulated engine."),
    "sql": ("analysis.cli.sql", "sql_command", "Ask traces and reports anything, in SQL."),
    "triage": ("analysis.cli.triage", "triage_command", "Answer the questions asked of every damage."),
    "watch": ("replayer.cli.watch", "watch_command", "Judge recordings while they are written."),
    "completion": ("", "", "Print the shell completion script."),
}


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    from . import __version__  # looked up here alone: reading a package's metadata takes longer than --help may

    click.echo(f"{context.info_name}, version {__version__}")
    context.exit()


_version_option: Final = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)


class _LazyGroup(JsonErrors, click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "completion":
            return completion
        if cmd_name == "replay":
            return _replay_command()
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        command = getattr(import_module(f".{module}", __package__), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.{name} is no click command")
        return command if module.startswith("recorder.") else _for_analysis(command, f"kvcanary {cmd_name}")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            if near := get_close_matches(args[0], _COMMANDS, n=1):
                raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in sorted(_COMMANDS)])


_HELP: Final = """The flight recorder and crash lab for an LLM inference engine's KV cache.

\b
From a production trace to a verdict:
  kvcanary record -o DIR -- COMMAND  run an engine's server with the recorder on
  kvcanary inspect trace.arrow       what is in it, what was lost
  kvcanary-replay trace.arrow        rebuild the pools, verify every forward, write trace.report/
  kvcanary watch DIR                 the same while the engine records, seconds behind
  kvcanary triage trace.report       who held the slot before, since when, what kind of bug
  kvcanary sql trace.report          any other question, in SQL
  kvcanary diff good.arrow bad.arrow where two runs of one workload part first
  kvcanary bisect traces/*.arrow     which engine version brought it
  kvcanary shrink trace.arrow        the smallest part that shows an incident, for an issue
  kvcanary hunt -- COMMAND           ask a real engine generated requests until something is wrong
  kvcanary report --issue trace.report   the text of the issue
  kvcanary recover torn.arrow        save what is whole of a torn trace
"""

_COMPLETION_HELP: Final = """Print the completion script for SHELL.

\b
Examples:
  kvcanary completion bash >> ~/.bashrc
  kvcanary completion zsh >> ~/.zshrc
  kvcanary completion fish > ~/.config/fish/completions/kvcanary.fish
"""


@click.group(cls=_LazyGroup, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@_version_option
def main() -> None:
    """Run one of the commands."""


@click.command("completion", help=_COMPLETION_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    for program, command in (("kvcanary", main), ("kvcanary-replay", _replay_command())):
        kind = get_completion_class(shell)
        if kind is None:
            raise click.ClickException(f"no completion for {shell}")
        variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
        click.echo(kind(command, {}, program, variable).source())


def _replay_command() -> click.Command:
    """Return the replay command: the replayer finds what is wrong, the analysis then says what it looks like."""
    from .analysis.finishing import add_page, finish
    from .replayer.cli.replay import make_replay_command

    return _for_analysis(make_replay_command(finish=finish, add_page=add_page), "kvcanary-replay")


def _for_analysis(command: click.Command, name: str) -> click.Command:
    """Return a command that needs what an engine's environment has not: without it, it says how to get it."""
    invoke = command.invoke

    def checked(context: click.Context) -> object:
        from importlib.util import find_spec

        if find_spec("duckdb") is None:
            fail(f"{name} needs DuckDB, which recording does without: pip install 'kvcanary[replay]'")
        return invoke(context)

    command.invoke = checked  # type: ignore[assignment, method-assign]  # of this one object
    return command


def kvcanary_main() -> None:
    """Entry point of `kvcanary`."""
    run_program(main, "kvcanary")


def replay_main() -> None:
    """Entry point of `kvcanary-replay`."""
    command = _version_option(_replay_command())
    command.context_settings["help_option_names"] = ["-h", "--help"]
    run_program(command, "kvcanary-replay")
