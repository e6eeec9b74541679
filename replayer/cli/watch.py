"""`kvcanary watch`: judge recordings while they are written."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from ...recorder.cli.program import GivenPath
from .options import check_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from ..watch.reactions import Metrics
    from ..watch.recording import WatchedRecording

_EPILOG = """\b
Examples:
  kvcanary watch /traces
      a table on the terminal, a line for whatever happens
  kvcanary watch /traces --metrics 9464 --on-incident './page-somebody.sh'
      the command finds KVCANARY_TRACE, KVCANARY_REPORT and KVCANARY_INCIDENT in its environment
  kvcanary watch /traces --freeze /run/kvcanary.freeze
      the first damage has the flight recorder keep what it has (docs/guide/segments.md)
  kvcanary watch /traces --once --json
      judge what is there, and wait for no more than recordings under way

Exit codes, once it is ended by Ctrl-C, SIGTERM or --once: 0 all clean so far, 1 violations or findings, 2 wrong usage,
125 nothing was recorded, or a verdict is inconclusive.
"""
_IDLE_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 2.0  # how often the folder is looked through
_NICE: Final = 10


def _address(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    address, _, port = value.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise click.BadParameter(f"{value!r} is no [ADDRESS:]PORT, such as 9464 or 127.0.0.1:9464")
    return address, int(port)


@click.command("watch", epilog=_EPILOG, context_settings={"show_default": True})
@click.argument("folder", type=GivenPath(exists=True, file_okay=False))
@click.option(
    "--metrics", metavar="[ADDRESS:]PORT", callback=_address, help="Serve Prometheus metrics there; 0 takes any port."
)
@click.option(
    "--on-incident",
    metavar="COMMAND",
    help="Run by the shell at the first damage of a recording, once its report is there.",
)
@click.option(
    "--freeze",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="Written at the first damage of a recording: what KVCANARY_FREEZE_FILE names.",
)
@click.option("--report/--no-report", default=True, help="Make a report beside a recording that is damaged.")
@click.option(
    "--checks",
    default="all",
    metavar="NAMES",
    callback=lambda _context, _parameter, value: check_names(value),
    help="History checks, as kvcanary-replay takes them.",
)
@click.option(
    "--kv-hash", type=click.Choice(["auto", "none", "partial", "all"]), default="auto", help="As kvcanary-replay."
)
@click.option("--once", is_flag=True, help="End when all that is there is judged and no recording is under way.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object a line for whatever happens, and at the end."
)
def watch_command(
    folder: Path,
    metrics: tuple[str, int] | None,
    on_incident: str | None,
    freeze: Path | None,
    report: bool,
    checks: tuple[str, ...],
    kv_hash: str,
    once: bool,
    as_json: bool,
) -> None:
    """Judge the recordings in FOLDER while engines write them, seconds behind.

    Each recording is replayed as it grows, in this one process, at low priority; it takes one core at most and the memory
    of a replay for each recording under way. Recordings that are over are judged to their end, once: the next watch
    passes over what .kvcanary-watch.json in FOLDER lists, and goes on with the others at the segment where it was.
    """
    from ...kernels.dispatch import prepare
    from ...kernels.replay_pass.state import STATE_LOOPS
    from ...recorder.cli.program import console_for, fail, loaded
    from ...recorder.errors import TraceError
    from ..report.summary import combined_exit_code
    from ..run.settings import ReplaySettings
    from ..watch.folder import WatchedFolder
    from ..watch.reactions import Reactions

    with contextlib.suppress(OSError):
        os.nice(_NICE)
    screen = _Screen(console_for(sys.stdout), as_json=as_json)
    reactions = Reactions(
        freeze_file=freeze, command=on_incident, reports=report, say=screen.warn, on_incident=screen.incident
    )

    def on_news(what: str, one: WatchedRecording | None, facts: Mapping[str, Any]) -> None:
        screen.news(what, facts)
        if one is None:
            return
        if what == "damage":
            reactions.freeze(f"kvcanary watch: damage in {one.name} within {facts['forwards']} forwards")
        if what == "damage" or (what == "over" and facts["verdict"] == "corrupt"):
            reactions.report(one.name, one.paths, calls=what == "damage")

    watched = WatchedFolder(folder, ReplaySettings(checks=checks, kv_hash=kv_hash), on_news)
    with _metrics(metrics, screen) as served:
        prepare(*STATE_LOOPS, backend="cpu")
        loaded()
        try:
            with screen.live():
                looked, pending = 0.0, False
                while True:
                    if time.monotonic() - looked >= _LOOK_SECONDS or not watched.under_way:
                        pending = watched.look()
                        looked = time.monotonic()
                    moved = watched.step()
                    reactions.look()
                    screen.show(watched.facts())
                    if served is not None:
                        served.update(watched.facts())
                    if once and not (moved or pending or watched.under_way or reactions.busy):
                        break
                    if not moved:
                        time.sleep(_IDLE_SECONDS)
        except TraceError as error:
            fail(str(error))
        except KeyboardInterrupt:  # how a watch is ended; what it knows is said below
            pass
        finally:
            reactions.stop()
            facts = list(watched.facts())
            watched.close()
    if watched.state_error:
        screen.warn(watched.state_error)
    screen.end(facts)
    codes = {"corrupt": 1, "inconclusive": 125, "clean": 0, "clean so far": 0}
    sys.exit(combined_exit_code([codes[one["verdict"]] for one in facts] or [125]))


@contextlib.contextmanager
def _metrics(where: tuple[str, int] | None, screen: _Screen) -> Iterator[Metrics | None]:
    """Serve metrics, if they are wanted."""
    from ...recorder.cli.program import fail
    from ..watch.reactions import Metrics

    if where is None:
        yield None
        return
    address, port = where
    try:
        served = Metrics(address or "0.0.0.0", port)  # noqa: S104  # a scraper is elsewhere, as a rule
    except ModuleNotFoundError:
        fail("--metrics needs prometheus_client: pip install 'kvcanary[replay]'")
    except OSError as error:
        fail(f"--metrics: port {port} cannot be served ({error.strerror}); name another")
    screen.serving(served.port)
    try:
        yield served
    finally:
        served.close()


class _Screen:
    """What a person sees, or a program reads: a line for whatever happens, below them a table on a terminal."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        self._console, self._as_json = console, as_json
        self._live: Live | None = None

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keep a table up to date on a terminal."""
        if self._as_json or not self._console.is_terminal:
            yield
            return
        from rich.live import Live

        with Live(console=self._console, transient=True, refresh_per_second=2) as self._live:
            yield
        self._live = None

    def show(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Show what is known now."""
        if self._live is not None:
            self._live.update(_table((one for one in facts if not one["over"]), self._console))

    def news(self, what: str, facts: Mapping[str, Any]) -> None:
        """Say what happened to a recording."""
        said = {
            "begun": "[bold]{recording}[/bold]  watched",
            "damage": "[bold red]{recording}  CORRUPT[/bold red]  within {forwards:,} forwards: {violations:,} violations, {findings:,} findings",
            "over": "[bold]{recording}[/bold]  over: {verdict}, {forwards:,} forwards, {violations:,} violations, {findings:,} findings",
            "unreadable": "[yellow]{recording}  not watched: {error}[/yellow]",
        }[what]
        if what == "over" and facts["verdict"] == "inconclusive":
            said += "".join(f"; {doubt}" for doubt in facts["doubts"]).replace("{", "{{").replace("}", "}}")
        self._say({"what": what, **facts}, said, facts)

    def incident(self, found: dict[str, Any]) -> None:
        """Say what a report says."""
        text = (
            "{recording}  {first_incident}   kvcanary triage {report}"
            if found["first_incident"]
            else "{recording}  report: {report}"
        )
        self._say({"what": "report", **found}, text, found)

    def serving(self, port: int) -> None:
        """Say where metrics are."""
        self._say({"what": "metrics", "port": port}, "metrics on port {port}", {"port": port})

    def warn(self, text: str) -> None:
        """Say what could not be done."""
        click.echo(text, err=True)

    def end(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Say how it stands in the end."""
        if self._as_json:
            click.echo(json.dumps({"what": "end", "recordings": facts}))
        elif facts:
            self._console.print(_table(facts, self._console), soft_wrap=True)
        else:
            self._console.print("nothing was recorded there")

    def _say(self, as_json: dict[str, Any], text: str, facts: Mapping[str, Any]) -> None:
        from rich.markup import escape

        from ...recorder.errors import printable

        if self._as_json:
            click.echo(json.dumps(as_json))
            return
        shown = {key: escape(printable(value)) if isinstance(value, str) else value for key, value in facts.items()}
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim]  {text.format(**shown)}", soft_wrap=True)


def _table(facts: Iterable[Mapping[str, Any]], console: Console) -> Text:
    from ...recorder.text_tables import columns_text

    counted = ("forwards", "requests", "violations", "findings", "events_lost")
    rows = [
        (
            one["recording"].removesuffix(".arrow"),
            one["verdict"],
            *(f"{one[key]:,}" for key in counted),
            "" if one["over"] else f"{one['seconds_behind']:.1f} s",
        )
        for one in facts
    ]
    numbers = ("forwards", "requests", "violations", "findings", "lost", "behind")
    styles = {"  corrupt": "bold red", "  inconclusive": "bold yellow", "  clean": "green"}
    return columns_text(console, rows, ("recording", "verdict", *numbers), right=numbers, styles=styles)
