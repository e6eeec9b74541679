"""The comparison's SQL, in `sql/diff/`: each statement runs over the facts of both traces, in the tables a_* and b_*."""

from typing import Any

from ..store.library import sql_sections


class Statements:
    """Runs the statements of one file by their names, with values in place of `{these}`."""

    def __init__(self, connection: Any, file: str) -> None:
        self._connection = connection
        self._sql = sql_sections("diff", file)

    def text(self, name: str, **values: object) -> str:
        """Return a statement."""
        return self._sql[name].format(**values)

    def run(self, name: str, **values: object) -> Any:
        """Run a statement."""
        return self._connection.execute(self.text(name, **values))

    def both(self, name: str, **values: object) -> None:
        """Run a statement for either trace; `{s}` is a or b."""
        for side in ("a", "b"):
            self.run(name, s=side, **values)

    def rows(self, name: str, parameters: list[Any] | None = None, **values: object) -> list[dict[str, Any]]:
        """Return a query's rows by their columns."""
        result = self._connection.execute(self.text(name, **values), parameters)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def count(self, name: str, **values: object) -> int:
        """Return a query's only number."""
        return number(self._connection, self.text(name, **values))


def number(connection: Any, query: str) -> int:
    """Return a query's only number."""
    return int(connection.execute(query).fetchone()[0])
