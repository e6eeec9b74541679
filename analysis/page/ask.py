"""Questions asked of a session for the page: every answer keeps the SQL that gave it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ..store.library import sql_text
from ..store.session import SqlSession

# A JavaScript number holds integers up to here; larger ones (hashes, ids) travel as text.
_MAX_SAFE_INTEGER: Final = (1 << 53) - 1
_MAX_TEXT: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many of each thing the page shows; what is left out is counted and said."""

    subjects: int = 10
    slots: int = 44
    places: int = 12
    lives: int = 800
    damage: int = 800
    writes: int = 500
    changes: int = 200
    windows: int = 4
    requests: int = 40
    request_parts: int = 3000
    request_damage: int = 1500
    bins: int = 600
    rows: int = 200

    def halved(self) -> "Limits":
        """Return half of everything, at least one each."""
        return Limits(**{name: max(1, getattr(self, name) // 2) for name in self.__dataclass_fields__})


class Ask:
    """Asks a session, and numbers the queries; `queries` are their texts in the order of their numbers."""

    def __init__(self, session: SqlSession) -> None:
        self.queries: list[str] = []
        self._session = session
        self._numbers: dict[str, int] = {}

    def query(self, sql: str) -> int:
        """Return the number of a query, a new one where it was not asked before."""
        text = sql.strip()
        if text not in self._numbers:
            self._numbers[text] = len(self.queries)
            self.queries.append(text)
        return self._numbers[text]

    def records(self, sql: str) -> list[dict[str, Any]]:
        """Run SQL and return its rows, for the page's maker only: nothing of them is shown. Raises `SqlError`."""
        return self._session.sql(sql).to_pylist()

    def number(self, sql: str) -> dict[str, Any]:
        """Return `{v, q}`: the first value of the first row, and the query's number. Raises `SqlError`."""
        table = self._session.sql(sql)
        return {"v": plain(table.column(0)[0].as_py()) if table.num_rows else None, "q": self.query(sql)}

    def table(self, sql: str) -> dict[str, Any]:
        """Return `{q, columns, data}`: the query's number, the column names, and the values column by column."""
        table = self._session.sql(sql)
        return {"q": self.query(sql), "columns": table.column_names, "data": columns_of(table)}


def columns_of(table: pa.Table) -> list[list[Any]]:
    """Return a table's values as the page holds them, column by column."""
    return [[plain(value) for value in column.to_pylist()] for column in table.columns]


def plain(value: Any) -> Any:
    """Return a value as JSON for a browser: large integers and unknown kinds as text, long texts cut."""
    if value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _MAX_SAFE_INTEGER else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def page_sql(name: str, values: Mapping[str, object] | None = None) -> str:
    """Return `sql/page/NAME.sql` with `values` in place of its placeholders (`:width`)."""
    text = sql_text("page", name)
    if not values:
        return text
    return re.sub(rf"(?<!:):({'|'.join(values)})\b", lambda found: str(values[found[1]]), text)
