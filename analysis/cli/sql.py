"""`kvcanary sql`: any question, in SQL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import CommandError, GivenPath, terminal_width
from ...recorder.remote import as_path
from ..errors import AnalysisError, SqlError
from . import say, trace_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..store.session import SqlSession
    from ..store.sources import Source

FORMATS = ("table", "tab", "csv", "json", "parquet", "arrow")

_EPILOG = """\b
Examples:
  kvcanary sql trace.arrow "select mode, count(*) from forwards group by mode"
  kvcanary sql trace.report
      a prompt with history and completion; \\? helps, \\d lists what there is, \\q leaves
  kvcanary sql trace.report "from slot_history(4711)"
      all that happened to a slot
  kvcanary sql a.arrow b.arrow "select trace, count(*) from tokens group by trace"
      several traces; the column trace says which
  kvcanary sql /traces/ "select trace, count(*) from forwards group by trace"
      all traces of a folder, with their reports where they were replayed
  kvcanary sql s3://bucket/table "from kinds_by_version"
      a table of many reports, made by kvcanary collect
  kvcanary sql trace.report --format parquet -o tokens.parquet "from tokens"
  kvcanary sql trace.report -f query.sql --format json | jq .
  kvcanary sql trace.report --save
      write report.duckdb into the report, for speed and for other DuckDB clients

\b
Exit codes: 0 answered, 2 wrong usage, an unreadable file, or an SQL error. docs/reference/sql.md describes every relation.
"""


@click.command("sql", epilog=_EPILOG)
@click.argument("arguments", nargs=-1, required=True, metavar='TRACE_OR_REPORT... ["SELECT ..."]')
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="Of the result.")
@click.option("-f", "--file", "script", type=GivenPath(allow_dash=True), help="Read SQL from a file; - is stdin.")
@click.option("-o", "--output", type=GivenPath(dir_okay=False), help="Write the result to a file.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--rows", type=click.IntRange(min=0), help="Rows shown in a table; 0: all. [default: 100 on a terminal, else all]"
)
@click.option(
    "--width", type=click.IntRange(min=0), help="How wide a table may be; 0: any. [default: the terminal's, else any]"
)
@click.option("-x", "--expanded", is_flag=True, help="A line a value instead of a table.")
@trace_option
@click.option("--save", is_flag=True, help="First write report.duckdb into each report.")
@click.option(
    "--live", is_flag=True, help="Read the files even where report.duckdb fits; raw_events is there only then."
)
@click.option(
    "--unlocked", is_flag=True, help="Let the SQL read and write files, load extensions and change DuckDB's settings."
)
def sql_command(
    arguments: tuple[str, ...], form: str, script: Path | None, output: Path | None, as_json: bool, **options: Any
) -> None:
    """Ask traces and reports anything, in SQL.

    Nothing is imported: DuckDB reads the files where they lie, and unless --unlocked no others. A report beside a trace (trace.report beside
    trace.arrow) goes with it. Without a query a prompt opens, or statements are read from a pipe.
    """
    paths, query = _split(arguments)
    form = "json" if as_json else form
    if query is not None and script is not None:
        raise click.UsageError("a query and --file exclude one another")
    if form in ("parquet", "arrow") and output is None and sys.stdout.isatty():
        raise click.UsageError(f"--format {form} is not for a terminal; name a file with -o")
    from .prompt import error_line

    try:
        _run(paths, query, script, output, form, options)
    except SqlError as error:
        locked = "disabled by configuration" in str(error) or "has been locked" in str(error)
        more = "; a query reaches only what is named on the command line, and more with --unlocked" if locked else ""
        raise CommandError(error_line(error) + more) from None
    except AnalysisError as error:
        raise CommandError(str(error)) from None


def _split(arguments: tuple[str, ...]) -> tuple[list[Path], str | None]:
    """Tell sources from the query: the last argument is one where no such file exists and it has more than a word."""
    last, paths = arguments[-1], [as_path(argument) for argument in arguments]
    if not last.strip():
        raise click.UsageError("the query, or a name, is empty; is a variable of the shell unset?")
    try:
        exists = paths[-1].exists()
    except (OSError, ValueError):  # too long for a name
        exists = False
    is_query = len(arguments) > 1 and not exists and (len(last.split()) > 1 or last.rstrip().endswith(";"))
    return (paths[:-1], last) if is_query else (paths, None)


def _run(
    paths: list[Path], query: str | None, script: Path | None, output: Path | None, form: str, options: dict[str, Any]
) -> None:
    from ..store.output import spare
    from ..store.report_rows import is_table
    from ..store.reports_table import open_table
    from ..store.session import open_sources
    from ..store.sources import find_sources, named_in
    from ..store.store import build_store

    tables = [path for path in paths if is_table(path)]
    if tables:
        given = [f"--{name}" for name in ("trace", "save", "live") if options[name]]
        if given or len(paths) > 1:
            what = f"{given[0]} goes with a report" if given else "a table of many reports is asked alone"
            raise click.UsageError(f"{what}; {tables[0]} is a table, made by kvcanary collect")
        if output is not None:
            spare([script] if script else [], output)
            if output.resolve().is_relative_to(paths[0].resolve()):
                raise AnalysisError(f"{output}: lies in the table that is asked; name a file elsewhere with -o")
        with open_table(paths[0], unlocked=options["unlocked"]) as session:
            for problem in session.problems:
                say(f"note: {problem}", err=True)
            _answer(session, query if query is not None else _read_script(script), query, output, form, options)
        return
    sources = find_sources([source for path in paths for source in named_in(path)], trace=options["trace"])
    if output is not None:
        spare([path for source in sources for path in source.kept] + ([script] if script else []), output)
    if options["save"]:
        for source in sources:
            say(f"wrote   {build_store(source)}", err=True)
        if query is None and script is None:
            return
    text = query if query is not None else _read_script(script)
    with open_sources(sources, use_store=not options["live"], unlocked=options["unlocked"]) as session:
        _tell_problems(sources, session)
        _answer(session, text, query, output, form, options)


def _answer(
    session: SqlSession, text: str | None, query: str | None, output: Path | None, form: str, options: dict[str, Any]
) -> None:
    """Answer a query, or those of a script or a pipe, or of whoever sits at the prompt."""
    from .prompt import View, converse, line_editing

    screen = sys.stdout.isatty() and output is None
    rows = options["rows"] if options["rows"] is not None else 100 * screen
    width = options["width"] if options["width"] is not None else terminal_width() if screen else None
    view = View(expanded=options["expanded"])

    def show(query: str) -> None:
        shown = {"max_rows": rows or None, "width": width or None, "expanded": view.expanded, "on_screen": screen}
        _show(session, query, form, output, shown)

    if text is None:
        if form in ("parquet", "arrow"):
            raise click.UsageError(f"--format {form} goes with a query")
        click.echo("\\? for help, \\d for what there is, \\q to leave")
        with line_editing(session.words) as read:
            converse(session, view, show=show, read=read, write=say)
    elif form == "table" and output is None and query is None:
        lines = iter(text.splitlines())
        converse(session, view, show=show, read=lambda _: _next_line(lines), write=say, strict=True)
    elif text.strip():
        show(text)


def _next_line(lines: Iterator[str]) -> str:
    line = next(lines, None)
    if line is None:
        raise EOFError
    return line


def _read_script(script: Path | None) -> str | None:
    """Return the SQL of a file or a pipe, None if a person sits at the other end."""
    if script is None and sys.stdin.isatty():
        return None
    if script is None or str(script) == "-":
        return sys.stdin.read()
    try:
        return script.read_text(encoding="utf-8")
    except OSError as error:
        raise AnalysisError(f"{script}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise AnalysisError(f"{script}: not UTF-8 text; name a file with SQL in it") from None


def _tell_problems(sources: list[Source], session: SqlSession) -> None:
    from ..store.triage import is_whole, lost_line

    for source in sources:
        if source.trace is None and not session.stored:
            message = f"{source.problem}: the report's trace is not at hand, only violations and findings are"
            say(f"note: {message} (--trace says where it is now)", err=True)
    for row in session.sql("from lost").to_pylist():
        if row["present"] and not is_whole(row):
            say(f"note: {row['trace']}: {lost_line(row)} (see losses and gaps)", err=True)


def _show(session: SqlSession, query: str, form: str, output: Path | None, shown: dict[str, Any]) -> None:
    import pyarrow as pa

    from ..store.output import private_output, write_result

    reader = session.batches(query)
    try:
        if output is None:
            sys.stdout.flush()
            write_result(reader, sys.stdout.buffer, form, **shown)
            return
        with private_output(output) as sink:
            write_result(reader, sink, form, **shown)
    except pa.ArrowException as error:
        raise SqlError(str(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AnalysisError(f"{output or 'standard output'}: cannot be written ({error.strerror or error})") from None
