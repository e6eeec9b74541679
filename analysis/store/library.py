"""The SQL library: every relation and macro, one `.sql` file each, in the order in which they build on one another.

`BASE` relations are computed from a trace's events or taken from a report; in a store they are tables. `DERIVED` are
views and macros over them, the same everywhere. A file starts with the comment that describes it.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

import pyarrow as pa

BASE: Final = (
    *("traces", "pool_groups", "streams", "gaps", "coverage", "events", "forwards", "forward_requests"),
    *("attention_slots", "statuses", "requests", "tokens", "samples", "slot_events", "lut_changes", "swa_tokens"),
    *("copies", "table_changes", "kv_changes", "transfers", "transfer_slots", "sweeps", "losses", "marks"),
    *("violations", "findings", "incidents", "incident_members"),
)
# Views and macros, each after those that it builds on: a view is bound when it is made.
_ORDER: Final = """
views/slot_writes views/table_entries macros/lifetimes_between views/slot_lifetimes views/violation_forwards views/damage
views/damage_forwards views/first_damage views/incident_violations views/incident_findings views/incident_requests
views/chunks views/lost macros/slot_history macros/slot_owner macros/request_timeline macros/neighbours
macros/first_bad_forward macros/blast_radius macros/block_table macros/table_diff macros/readers macros/freed_by
"""
DERIVED: Final = tuple((folder, name) for folder, _, name in (path.partition("/") for path in _ORDER.split()))
_TYPES: Final = {
    "bigint": pa.int64(),
    "integer": pa.int32(),
    "tinyint": pa.int8(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "varchar": pa.utf8(),
    "varchar[]": pa.list_(pa.utf8()),
    "blob": pa.binary(),
}


def table_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of a table whose columns are listed as in SQL: "event bigint, name varchar"."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in map(str.split, columns.split(","))])


_SECTION: Final = re.compile(r"^-- section: (\w+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlFile:
    """One file of the library: its description, and the statement below it."""

    name: str
    description: str
    sql: str


@cache
def sql_text(folder: str, name: str) -> str:
    """Return `sql/FOLDER/NAME.sql` of the package."""
    return (files(__package__) / "sql" / folder / f"{name}.sql").read_text(encoding="utf-8")


@cache
def sql_sections(folder: str, name: str) -> dict[str, str]:
    """Return the parts of a file by the names in its `-- section: NAME` lines; "" is what stands above them."""
    head, *parts = _SECTION.split(sql_text(folder, name))
    return {"": head.strip(), **dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))}


@cache
def sql_file(folder: str, name: str) -> SqlFile:
    """Return a file of the library, `sql/FOLDER/NAME.sql`."""
    lines = sql_text(folder, name).splitlines()
    start = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    described = " ".join(line.removeprefix("--").strip() for line in lines[:start])
    return SqlFile(name=name, description=described, sql="\n".join(lines[start:]).strip().removesuffix(";"))


def base_statements(*, stored: bool) -> list[str]:
    """Return the statements that make the base: tables where it is stored, else views."""
    kind = "table" if stored else "view"
    return [f"create {kind} {name} as\n{_trace_last(sql_file('base', name).sql)}" for name in BASE]


def _trace_last(sql: str) -> str:
    """Move the column that is the same everywhere, where one trace is asked, behind all others."""
    return f"select * exclude (trace), trace from (\n{sql}\n)"


def derived_statements() -> list[str]:
    """Return the statements that make views and macros over the base."""
    return [
        f"create view {name} as\n{_trace_last(sql_file(folder, name).sql)}"
        if folder == "views"
        else sql_file(folder, name).sql
        for folder, name in DERIVED
    ]


def comment_statements() -> list[str]:
    """Return statements that leave each description in a store, where any client shows it."""
    kinds = {"base": "table", "views": "view", "macros": "macro table"}
    return [
        f"comment on {kinds[folder]} {name} is '{sql_file(folder, name).description.replace(chr(39), chr(39) * 2)}'"
        for folder, name in [*(("base", name) for name in BASE), *DERIVED]
    ]


@cache
def library_hash() -> str:
    """Return a hash of the library, by which a store knows whether another version of kvcanary made it."""
    return hashlib.sha256("".join([*base_statements(stored=True), *derived_statements()]).encode()).hexdigest()
