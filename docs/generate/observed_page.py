"""Write docs/internals/observed.md from docs/internals/observed.toml: `python docs/generate/observed_page.py`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

INTERNALS: Final = Path(__file__).parents[1] / "internals"
EVERY: Final = ("event", "kind", "time_ns")
HOW: Final = {
    "observed": "read from the tensors or lists that the engine works with, at the place named",
    "reported": "an argument or a field of the engine's host code, which may differ from what its kernels got",
    "numbered": "the recorder's own numbering, time or framing; nothing of the engine's is in it",
    "derived": (
        "worked out. The header names such columns of a forward (`runners[].derived`), and nothing is judged from them\n"
        "  (../reference/replay.md#derived-columns); labels by which nothing is judged need no name there"
    ),
    "absent": "not recorded: the column holds its default; the verdict's line `not watched` says so",
}
_HEAD: Final = """# Where each value in a trace comes from

Made by `python docs/generate/observed_page.py` from `observed.toml` beside this page: change that, with the adapter's code that it
speaks of. A verdict rests on what was observed; so each column of each event is one of these:

"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a column comes from, in a sentence's words without its full stop; `how` is a key of `HOW`."""

    how: str
    where: str


Columns = tuple[str, ...]
Table = dict[str, dict[Columns, Source]]


class Sources:
    """The tables of `observed.toml`: `uses` has the columns of each kind of event, `adapters` each adapter's table.

    An adapter's own entries go before those of the recorder, which it shares with all others.
    """

    def __init__(self, path: Path = INTERNALS / "observed.toml") -> None:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        self._groups: dict[str, str] = found["groups"]
        self.uses: dict[str, Columns] = {}
        self.uses = {kind: self._columns(named, kind) for kind, named in found["uses"].items()}
        self._recorder = self._table(found["recorder"])
        self.adapters: dict[str, Table] = {}
        for name, kinds in found["adapters"].items():
            like = found["adapters"].get(kinds.pop("like", ""), {})
            merged = {kind: {**like.get(kind, {}), **kinds.get(kind, {})} for kind in {**like, **kinds}}
            self.adapters[name] = self.with_recorder(self._table(merged))

    def with_recorder(self, own: Table) -> Table:
        """Return an adapter's whole table: its own entries, and the recorder's for the columns that it leaves out."""
        whole: Table = {}
        for kind in self.uses:
            mine = dict(own.get(kind, {}))
            named = {column for columns in mine for column in columns}
            for columns, source in self._recorder.get(kind, {}).items():
                left = tuple(column for column in columns if column not in named)
                if left:
                    mine[left] = source
            whole[kind] = mine
        return whole

    def missing(self, table: Table) -> list[str]:
        """Return what a whole table leaves out, or has twice, or what no such event uses, as `kind.column`."""
        wrong = []
        for kind, columns in self.uses.items():
            named = [column for entry in table.get(kind, {}) for column in entry]
            wrong += [f"{kind}.{c}" for c in {*columns, *named} if named.count(c) != columns.count(c)]
        return sorted(wrong)

    def page(self) -> str:
        """Return the page."""
        parts = [_HEAD, *(f"- **{how}**: {meaning}.\n" for how, meaning in HOW.items())]
        parts.append("\n`event`, `kind` and `time_ns` of every event are the recorder's own.\n")
        for name, table in self.adapters.items():
            parts.append(f"\n## {name[0].upper()}{name[1:]}\n\n| event | columns | | where |\n|---|---|---|---|\n")
            for kind, entries in table.items():
                for columns, source in entries.items():
                    named = ", ".join(f"`{column}`" for column in columns)
                    parts.append(f"| {kind} | {named} | {source.how} | {source.where} |\n")
        return "".join(parts)

    def _table(self, found: dict[str, dict[str, Any]]) -> Table:
        return {
            kind: {self._columns(named, kind): Source(how, where) for named, (how, where) in entries.items()}
            for kind, entries in found.items()
        }

    def _columns(self, named: str, kind: str) -> Columns:
        """Return the columns of an entry: names, `@group` for a group's, `*` for all of the kind's."""
        if named == "*":
            return self.uses[kind]
        words = (self._groups[word[1:]] if word.startswith("@") else word for word in named.split())
        return tuple(" ".join(words).split())


if __name__ == "__main__":
    (INTERNALS / "observed.md").write_text(Sources().page(), encoding="utf-8")
