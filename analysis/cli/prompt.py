r"""The interactive prompt of `kvcanary sql`: statements over several lines until `;`, history, completion, `\` commands."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import SqlError
from ..store.library import DERIVED
from ..store.session import SqlSession

_MACROS: Final = frozenset(name for folder, name in DERIVED if folder == "macros")
FIRST_LINE, NEXT_LINE = "kvcanary> ", "     ...> "
_DELIMITERS: Final = " \t\n,()=<>;'"

_HELP: Final = r"""End a statement with ; (several lines are fine).
\d        list relations and macros          \d NAME   a relation's columns, what a macro does
\x        a line a value instead of tables   \timing   how long each query took
\q        leave (or Ctrl-D)                  Ctrl-C    drop the statement, or stop the query"""


@dataclass(slots=True)
class View:
    """How answers are shown: `expanded` with a line a value, `timing` with the time that each took."""

    expanded: bool = False
    timing: bool = False


def converse(
    session: SqlSession,
    view: View,
    *,
    show: Callable[[str], None],
    read: Callable[[str], str],
    write: Callable[[str], None],
    strict: bool = False,
) -> None:
    """Read statements and answer them until the input ends or the user leaves.

    `show` prints the rows of a query as `view` says, or raises `SqlError`; `read` is like `input`; `write` prints a line.
    `strict`: nobody sits there; the first error is raised, and what lacks its `;` at the end is answered too.
    """
    pending = ""

    def answer(query: str) -> None:
        begun = time.monotonic()
        try:
            show(query)
        except SqlError as error:
            if strict:
                raise
            write(error_line(error))
        except KeyboardInterrupt:
            if strict:
                raise
            write("interrupted")
        if view.timing:
            write(f"{time.monotonic() - begun:.3f} s")

    while True:
        try:
            line = read(NEXT_LINE if pending else FIRST_LINE)
        except (EOFError, KeyboardInterrupt) as end:
            if strict and pending.strip():
                answer(pending)
            if not strict:
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
            answer(pending)
        elif name == r"\q":
            return
        elif name == r"\d" and argument in _MACROS:  # which DuckDB does not describe
            write(session.relations()[argument])
        elif name == r"\d" and argument:
            answer('select column_name, column_type from (describe "' + argument.replace('"', '""') + '")')
        elif name == r"\d":
            width = max(map(len, session.relations()))
            for relation, description in session.relations().items():
                write(f"{relation:{width}}  {description.split('. ')[0].rstrip('.')}")
        elif name in (r"\x", r"\timing"):
            what = "expanded" if name == r"\x" else "timing"
            setattr(view, what, not getattr(view, what) if argument not in ("on", "off") else argument == "on")
            write(f"{what} is {'on' if getattr(view, what) else 'off'}")
        else:
            if name not in (r"\?", r"\h"):
                write(f"no command {name}; these are there:")
            write(_HELP)
        pending = ""


def error_line(error: Exception) -> str:
    """Return DuckDB's message in one line: what is wrong, what it takes for meant, and where, if there are several lines."""
    said, places = [], []
    for line in str(error).splitlines():
        if line.startswith("LINE "):
            places.append(line.partition(":")[0].removeprefix("LINE "))
        elif line.strip() and not places and not line.startswith('Did you mean "_'):  # a relation of our own
            said.append(line.strip())
    place = f" (line {places[0]})" if places and places[0] != "1" else ""
    return " ".join(said) + place


@contextlib.contextmanager
def line_editing(words: Callable[[], list[str]]) -> Iterator[Callable[[str], str]]:
    """Give a function like `input` that edits statements, with history and completion."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.filters import is_done
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    class Words(Completer):
        def __init__(self) -> None:
            self._known: list[str] = []

        def get_completions(self, document: Any, _event: Any) -> Iterator[Completion]:
            self._known = self._known or words()
            part = document.get_word_before_cursor(WORD=True)
            for delimiter in _DELIMITERS:
                part = part.rpartition(delimiter)[2]
            for word, typed in completions(self._known, part):
                yield Completion(word, start_position=-typed)

    keys = KeyBindings()

    @keys.add("enter", filter=~is_done)
    def _(event: Any) -> None:
        text = event.current_buffer.text.strip()
        if not text or text.startswith("\\") or text.endswith(";"):
            event.current_buffer.validate_and_handle()
        else:
            event.current_buffer.insert_text("\n")

    state = os.environ.get("XDG_STATE_HOME", "")
    path = (Path(state) if state else Path.home() / ".local" / "state") / "kvcanary" / "sql_history"
    history: History = InMemoryHistory()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # queries may hold tokens and names
        history = FileHistory(path)
    asking: PromptSession[str] = PromptSession(
        history=history, completer=Words(), complete_while_typing=False, key_bindings=keys, multiline=True,
        prompt_continuation=NEXT_LINE,
    )  # fmt: skip
    yield asking.prompt


def completions(words: list[str], text: str) -> list[tuple[str, int]]:
    """Return the words that `text` may become, and how much of each is typed; of `t.tok` the part behind the dot."""
    part = text.rpartition(".")[2]
    return [(word, len(part)) for word in words if word.lower().startswith(part.lower())]
