"""`kvcanary bisect`: the engine version that brought a fault."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ...recorder.cli.program import EXIT_FAILED, CommandError, GivenPath
from ..bisect import LOG
from ..errors import AnalysisError
from . import command_line, errors_end, say, say_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from click.shell_completion import CompletionItem

    from ..bisect.bisection import Bisection, Report
    from ..bisect.criteria import Criterion
    from ..bisect.environments import Environments
    from ..bisect.search import BisectVerdict

MAX_SHOWN: Final = 12

_EXIT_CODES = """\b
Exit codes: 0 the first bad version was found, 1 there is none between the ends (the first is bad, or the last is good),
2 wrong usage or unreadable input, 125 several versions are left because others could not be judged.
docs/guide/bisect.md says more.
"""

_SAVED_EPILOG = f"""\b
Commands:
  kvcanary bisect TRACES...  over saved traces, as described here
  kvcanary bisect run        record the versions that are asked for: kvcanary bisect run --help
  kvcanary bisect log        show what a bisection by `run` has tried
  kvcanary bisect reset      forget it, and have git check out what was there before

\b
Examples:
  kvcanary bisect traces/*.arrow
      saved traces of many engine versions: which version was the first with a violation?
  kvcanary bisect --incident stale_swa_mapping traces/*.arrow
  kvcanary bisect --sql "select count(*) > 0 from violations where position > 4096" traces/*.arrow
  kvcanary bisect --reference good.arrow --no-kv traces/*.arrow
      the first version that differs from a good trace of the same prompts
  kvcanary bisect --order commits.txt v1/ v2/ v3/
      a folder is one run: its ranks, or a prefill and a decode side
  kvcanary bisect --finding slot_leaked builds/
      what kvcanary bisect run --keep builds has kept, by another criterion
  kvcanary bisect run --good 0.5.16 --bad 0.5.23 --versions 0.5.16,0.5.18,0.5.20,0.5.23 -- ./record.sh {{version}} {{out}}
      record each version when its turn comes; see kvcanary bisect run --help

{_EXIT_CODES}"""

_RUN_EPILOG = f"""\b
COMMAND runs the engine of one version, recorded. In its words {{version}}, {{out}} (a folder of the trial's own) and
{{trace}} (trace.arrow in it) are put in; KVCANARY_BISECT_VERSION, KVCANARY_TRACE (the folder, which is where the
adapters record) and KVCANARY_BISECT_TRACE hold the same. Every trace in the folder is judged. Exit code 0: judge;
125, any other failure, no trace, or the time limit: the version is skipped; 126 and 127: the bisection ends.

\b
Examples:
  kvcanary bisect run --good 0.5.16 --bad 0.5.23 --versions versions.txt -- ./record.sh {{version}} {{out}}
      #!/bin/sh
      /envs/sglang-$1/bin/python generate.py
  kvcanary bisect run --good v1.0 --bad main -- sh -c 'git checkout -q {{version}} && python engine.py {{trace}}'
      without --versions: the commits of the git repository here
  kvcanary bisect run --tries 3 --vote any --timeout 600 --good a --bad c --versions a,b,c -- ./record.sh {{version}}
      a fault that shows now and then
  kvcanary bisect run --versions transformers==5.19.0..5.23.0 -- python generate.py {{trace}}
      all releases from the one to the other, each in a virtual environment that is made for it and kept for the next time
  kvcanary bisect run --versions sglang==0.5.16..0.5.23 --env 'sh install.sh {{version}}' -- python generate.py
      what one `pip install` does not install, a script does: it runs in the new environment, as if that were activated

\b
Interrupted, the same command goes on where it was: trials stand in the log, which kvcanary bisect log shows and kvcanary bisect
reset removes.

{_EXIT_CODES}"""


class _BisectGroup(click.Group):
    """`kvcanary bisect TRACES...` is `kvcanary bisect saved TRACES...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            args = ["--help"]
        return super().parse_args(ctx, args if not args or args[0] in ("run", "log", "reset") else ["saved", *args])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        known = [item for item in super().shell_complete(ctx, incomplete) if item.value not in ("saved", "--help")]
        if known and not incomplete.startswith("-"):  # beside names of files a shell would drop them
            return known
        saved = self.commands["saved"]
        with saved.make_context("saved", [], parent=ctx, resilient_parsing=True) as of_saved:
            if incomplete.startswith("-"):
                return saved.shell_complete(of_saved, incomplete)
            traces = next(param for param in saved.params if param.name == "traces")
            return traces.shell_complete(of_saved, incomplete)


_log_option = click.option(
    "--log",
    type=GivenPath(dir_okay=False),
    default=LOG,
    show_default=True,
    help="Trials done, to go on from.",
)


def _criterion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    votes, how = click.Choice(["majority", "any"]), "How several runs of a version count; a draw is bad."
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--vote", type=votes, default="majority", show_default=True, help=how),
        click.option("--kv-tolerance", type=click.FloatRange(min=0), help="With --reference: as in kvcanary diff."),
        click.option("--no-kv", is_flag=True, help="With --reference: compare no KV bytes."),
        click.option("--sql", default="", metavar="QUERY", help="Bad is a query whose first value is true."),
        click.option("--reference", default="", metavar="TRACE", help="Bad is a difference from this trace."),
        click.option("--finding", default="", metavar="KIND", help="Bad is a finding of this kind."),
        click.option("--incident", default="", metavar="KIND", help="Bad is an incident of this kind."),
    ):
        command = option(command)
    return command


@click.group("bisect", cls=_BisectGroup, invoke_without_command=False)
def bisect_command() -> None:
    """Find the engine version that brought a fault."""


@bisect_command.command("saved", epilog=_SAVED_EPILOG, options_metavar="[OPTIONS]")
@click.argument("traces", nargs=-1, required=True, metavar="TRACES...", type=GivenPath(url=True))
@click.option(
    "--order",
    type=GivenPath(),
    metavar="FILE",
    help="Versions, commits or trace files, one a line, oldest first. [default: by the versions in the headers]",
)
@click.option("--cache", type=GivenPath(file_okay=False), help="Where verdicts are kept.")
@click.option("--no-cache", is_flag=True, help="Judge every trace anew.")
@_criterion_options
def saved_command(
    traces: tuple[Path, ...], order: Path | None, cache: Path | None, no_cache: bool, **options: Any
) -> None:
    """Bisect over TRACES, saved from several versions of an engine: files, or folders that are one run each.

    Both ends are verified first. Verdicts are kept by the content of the traces, so that a second call is quick.
    `kvcanary bisect run` records the versions itself.
    """
    if cache and no_cache:
        raise click.UsageError("--cache and --no-cache exclude one another")

    def bisect(criterion: Criterion, report: Report) -> Bisection:
        from ...kernels.user_cache import user_cache
        from ..bisect.bisection import bisect_saved
        from ..bisect.log import VerdictCache
        from ..bisect.versions import read_order, read_versions

        versions, said = read_versions(traces, read_order(order) if order else ())
        if said:
            say_error(said, kind="note: ")
        kept = VerdictCache(None if no_cache else cache or user_cache() / "bisect")
        return bisect_saved(versions, criterion, kept, rule=options["vote"], report=report)

    _finish(bisect, options, anew="--no-cache")


@bisect_command.command("run", epilog=_RUN_EPILOG, context_settings={"ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
@click.option("--good", help="A version known to be good. [default: the first of PACKAGE==A..B]")
@click.option("--bad", help="A later one known to be bad. [default: the last of PACKAGE==A..B]")
@click.option(
    "--versions",
    metavar="LIST|FILE|PACKAGE==A..B",
    help="Versions, oldest first: joined by commas, one a line, or all that were released from A to B. [default: git]",
)
@click.option(
    "--env",
    metavar="COMMAND",
    callback=command_line,
    help="Make a virtual environment for each version by COMMAND. [default for PACKAGE==A..B: pip install]",
)
@click.option(
    "--share",
    type=GivenPath(file_okay=False),
    metavar="DIR|none",
    help="An environment whose packages the new ones see, behind their own. [default: the one that kvcanary runs in]",
)
@click.option(
    "--env-limit",
    type=click.FloatRange(min=0),
    default=20.0,
    show_default=True,
    metavar="GB",
    help="Disk for environments that are kept.",
)
@click.option("--tries", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of a version at most.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds for one run.")
@_log_option
@click.option("--fresh", is_flag=True, help="Begin anew, over an older log.")
@click.option("--keep", type=GivenPath(file_okay=False), help="Keep the traces in this folder.")
@_criterion_options
def run_command(
    command: tuple[str, ...],
    good: str | None,
    bad: str | None,
    versions: str | None,
    timeout: float | None,
    log: Path,
    fresh: bool,
    keep: Path | None,
    **options: Any,
) -> None:
    """Record and judge the versions between --good and --bad that a bisection asks for."""

    def bisect(criterion: Criterion, report: Report) -> Bisection:
        from ... import __version__
        from ..bisect.bisection import bisect_run
        from ..bisect.environments import package_range, released
        from ..bisect.log import BisectLog
        from ..bisect.trial import Command, listed_versions
        from ..bisect.versions import checked_out

        if timeout is not None and not math.isfinite(timeout):
            raise click.UsageError(
                f"--timeout is {timeout}, expected seconds; without it a run may take as long as it likes"
            )
        if not math.isfinite(options["env_limit"]):
            said = f"--env-limit is {options['env_limit']}, expected GB; for no limit name more than the disk has"
            raise click.UsageError(said)
        package, first, last = package_range(versions or "")
        if not (good or first) or not (bad or last):
            raise click.UsageError("--good and --bad are needed, unless --versions is PACKAGE==A..B")
        listed = ",".join(released(package, first, last)) if package else versions
        names = listed_versions(listed, good or first, bad or last)
        if fresh:
            log.unlink(missing_ok=True)
        about = {"versions": names, "command": list(command), "criterion": criterion.key(), "kvcanary": __version__}
        environments = _environments(package, options["env"], options["share"], options["env_limit"])
        if environments is not None:
            about["environments"] = environments.key()
        return bisect_run(
            names,
            Command(
                words=command,
                timeout_s=timeout,
                keep=keep.absolute() if keep else None,
                environments=environments,
            ),
            criterion,
            BisectLog(log, about, checked_out() if versions is None else ""),
            tries=options["tries"],
            rule=options["vote"],
            report=report,
        )

    _finish(bisect, options, anew="--fresh")


@bisect_command.command("log")
@_log_option
@click.option("--json", "as_json", is_flag=True, help="Print the lines of the log as a list.")
def log_command(log: Path, as_json: bool) -> None:
    """Show what a bisection has tried, in its order."""
    from ..bisect.log import read_log
    from ..bisect.versions import subjects

    with errors_end():
        lines = read_log(log)
    if as_json:
        click.echo(json.dumps(lines, indent=2))
        return
    if not lines:
        say(f"{log}: no bisection by kvcanary bisect run here")
        return
    about, named = lines[0].get("bisect", {}), subjects(str(line.get("version")) for line in lines[1:])
    say(f"{len(about['versions'])} versions, by {shlex.join(about['command'])}")
    for line in lines[1:]:
        verdict, version = line["judgement"], str(line["version"])
        say(f"{verdict['outcome']:5s}{_label(version, named)}   {line['seconds']:.1f} s   {verdict['words']}")


@bisect_command.command("reset")
@_log_option
def reset_command(log: Path) -> None:
    """Forget what a bisection has tried; have git check out what was there when it began, if its versions were git's."""
    from ..bisect.log import read_log
    from ..bisect.versions import checked_out, git

    with errors_end(OSError):
        lines = read_log(log)
        head = str(lines[0].get("head", "")) if lines else ""
        if head and head != checked_out():
            git("checkout", "-q", head, "--")
            say(f"checked out {head}")
        log.unlink(missing_ok=True)
    say(f"{log}: {'removed' if lines else 'there was none'}")


def _environments(package: str, env: str | None, share: Path | None, limit_gb: float) -> Environments | None:
    """Return what makes a virtual environment for each version, None if neither a package nor a command is named for it."""
    from ...kernels.user_cache import user_cache
    from ..bisect.environments import OWN, Environments, default_install, packages_of

    if not (package or env):
        return None
    shared = OWN if share is None else None if share == Path("none") else share.absolute()
    if shared is not None and not packages_of(shared).is_dir():
        raise click.UsageError(f"--share {share}: no virtual environment of this Python; expected one, or none")
    return Environments(
        folder=user_cache() / "environments",
        install=env or default_install(package, shared),
        share=shared,
        limit_bytes=int(limit_gb * 1e9),
        progress=lambda text: say(f"     {text}", err=True),
    )


def _label(version: str, named: Mapping[str, str]) -> str:
    """Return a version as it is shown: a commit short, with its subject."""
    return f"{version[:12]} ({named[version]})" if version in named else version


def _finish(bisect: Callable[[Criterion, Report], Bisection], options: dict[str, Any], *, anew: str) -> None:
    """Bisect, print what came of it, and exit; `anew` is the option by which verdicts from before do not count."""
    from ..bisect.bisection import make_criterion
    from ..bisect.versions import subjects

    def report(version: str, one: BisectVerdict) -> None:
        say(f"{one.mark.value:5s}{_label(version, subjects([version]))}   {one.words}", err=as_json)

    as_json = options["as_json"]
    asked = {kind: options[kind] for kind in ("incident", "finding", "reference", "sql")}
    try:
        criterion = make_criterion(asked, kv=not options["no_kv"], kv_tolerance=options["kv_tolerance"])
        criterion.check()
        found = bisect(criterion, report)
    except AnalysisError as error:
        raise CommandError(str(error), exit_code=EXIT_FAILED) from None
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        for line in _lines(found, anew):
            say(line)
    sys.exit(found.exit_code)


def _lines(found: Bisection, anew: str) -> list[str]:
    from ...replayer.cli.incident_blocks import count_of
    from ..bisect.versions import subjects

    cached = f", {count_of(found.cached, 'verdict')} from before ({anew} judges anew)" if found.cached else ""
    asked = f"{len(found.search.judged)} of {len(found.versions)} versions"
    lines = ["", f"judged  {asked} by {found.criterion.words()}{cached}"]
    named = subjects(found.versions)
    if found.first_bad is not None:
        lines.append(f"FOUND   {_label(found.first_bad, named)} is the first bad version")
    elif found.candidates:
        shown = ", ".join(_label(name, named) for name in found.candidates[:MAX_SHOWN])
        more = f" and {len(found.candidates) - MAX_SHOWN} more" if len(found.candidates) > MAX_SHOWN else ""
        lines.append(f"SKIPS   the first bad version is one of {shown}{more}: those between could not be judged")
    else:
        lines.append(f"NONE    {found.search.problem}")
    if found.search.good >= 0 and found.candidates:
        lines.append(f"        the last good one is {_label(found.versions[found.search.good], named)}")
    if found.doubt:
        lines.append(f"doubt   {found.doubt}")
    if found.evidence is not None and found.search.bad >= 0:
        lines.append(f"there   {_label(found.versions[found.search.bad], named)}: {found.evidence.words}")
        lines.append(f"next    {found.reproduce}")
    return lines
