r"""The interactive prompt of `kvcanary sql`: statements over several lines until `;`, history, completion.

`\q` leaves, `\d` lists relations, `\d NAME` shows a relation's columns, `\h` helps.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import SqlError
from ..store.library import DERIVED
from ..store.session import SqlSession

_MACROS = frozenset(name for folder, name in DERIVED if folder == "macros")
FIRST_LINE, NEXT_LINE = "kvcanary> ", "     ...> "

_HELP = r"""End a statement with ; (several lines are fine).
\d        list relations and macros          \d NAME   a relation's columns, what a macro does
\q        leave (or Ctrl-D)                  Ctrl-C    drop the statement, or stop the query"""


def converse(
    session: SqlSession, *, show: Callable[[str], None], read: Callable[[str], str], write: Callable[[str], None]
) -> None:
    """Read statements and answer them until the input ends or the user leaves.

    `show` prints the rows of a query, or raises `SqlError`; `read` is like `input`; `write` prints a line.
    """
    pending = ""
    while True:
        try:
            line = read(NEXT_LINE if pending else FIRST_LINE)
        except (EOFError, KeyboardInterrupt) as end:
            write("")
            pending = ""
            if isinstance(end, EOFError):
                return
            continue
        pending = f"{pending}\n{line}" if pending else line
        name, _, argument = pending.strip().partition(" ")
        argument = argument.strip().rstrip(";")
        if not name:
            pending = ""
        elif not name.startswith("\\"):
            if not pending.rstrip().endswith(";"):
                continue
            _answer(pending, show, write)
        elif name == r"\q":
            return
        elif name == r"\d" and argument in _MACROS:  # which DuckDB does not describe
            write(session.relations()[argument])
        elif name == r"\d" and argument:
            _answer('describe "' + argument.replace('"', '""') + '"', show, write)
        elif name == r"\d":
            width = max(map(len, session.relations()))
            for relation, description in session.relations().items():
                write(f"{relation:{width}}  {description.split('. ')[0].rstrip('.')}")
        else:
            write(_HELP)
        pending = ""


def _answer(query: str, show: Callable[[str], None], write: Callable[[str], None]) -> None:
    try:
        show(query)
    except SqlError as error:
        write(str(error))
    except KeyboardInterrupt:
        write("interrupted")


@contextlib.contextmanager
def line_editing(words: Callable[[], list[str]]) -> Iterator[None]:
    """Edit lines with history and completion while the context lasts, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME", "")
    history = (Path(state) if state else Path.home() / ".local" / "state") / "kvcanary" / "sql_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    known: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if not known:
            known.extend(words())
        return completion(known, text, state)

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n,()=<>;'")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)  # queries may hold tokens and names
            readline.write_history_file(history)


def completion(words: list[str], text: str, state: int) -> str | None:
    """Return the `state`-th word that `text` may become, None past the last; the part after a dot is completed."""
    before, dot, part = text.rpartition(".")
    found = [before + dot + word for word in words if word.lower().startswith(part.lower())]
    return found[state] if state < len(found) else None
