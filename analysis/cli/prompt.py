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


class Prompt:
    """Reads statements and answers them until the user leaves.

    `show` prints the rows of a query, or raises `SqlError`; `read` is like `input`; `write` prints a line.
    """

    def __init__(
        self,
        session: SqlSession,
        *,
        show: Callable[[str], None],
        read: Callable[[str], str],
        write: Callable[[str], None],
    ) -> None:
        self._session = session
        self._show = show
        self._read = read
        self._write = write

    def run(self) -> None:
        """Answer until the input ends."""
        pending = ""
        while True:
            try:
                line = self._read(NEXT_LINE if pending else FIRST_LINE)
            except EOFError:
                self._write("")
                return
            except KeyboardInterrupt:
                self._write("")
                pending = ""
                continue
            if not pending and line.strip().startswith("\\"):
                if not self._command(line.strip()):
                    return
                continue
            pending = f"{pending}\n{line}" if pending else line
            if not pending.strip():
                pending = ""
            elif pending.rstrip().endswith(";"):
                self._answer(pending)
                pending = ""

    def _command(self, line: str) -> bool:
        """Obey a backslash command; False to leave."""
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip().rstrip(";")
        if name == "q":
            return False
        if name == "d" and argument in _MACROS:  # which DuckDB does not describe
            self._write(self._session.relations()[argument])
        elif name == "d" and argument:
            self._answer('describe "' + argument.replace('"', '""') + '"')
        elif name == "d":
            width = max(map(len, self._session.relations()))
            for relation, description in self._session.relations().items():
                self._write(f"{relation:{width}}  {description.split('. ')[0].rstrip('.')}")
        else:
            self._write(_HELP)
        return True

    def _answer(self, query: str) -> None:
        try:
            self._show(query)
        except SqlError as error:
            self._write(str(error))
        except KeyboardInterrupt:
            self._write("interrupted")


@contextlib.contextmanager
def line_editing(words: Callable[[], list[str]]) -> Iterator[None]:
    """Edit lines with history and completion while the context lasts, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    history = _history_path()
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


def _history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "kvcanary" / "sql_history"
