"""The joins that find, for each pair of requests and each kind, the first place where the two traces part.

Every statement adds to the table `firsts`. `seen` is the event of B at which the difference shows, by which differences
are ordered; `AT_THE_END` where it shows only when a request, or the trace, is over.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from .comparability import ComparisonPlan, beyond
from .facts import Statements, number
from .settings import DiffSettings

SIDES: Final = ("a", "b")
AT_THE_END: Final = 1 << 62


class Kept:
    """Which tokens of a trace came to be: the condition by which facts of guesses are left out that were rejected."""

    def __init__(self, connection: Any) -> None:
        sql = Statements(connection, "differences")
        self._text: dict[str, str] = {}
        for side in SIDES:
            if number(connection, f"select count(*) from {side}_tokens where guess = 1"):
                sql.run("kept_guesses", s=side)
                self._text[side] = sql.text("with_kept", s=side, drafts="{drafts}")

    def tokens(self, side: str, *, drafts: bool) -> str:
        """Return what is to follow a table `t` of facts with request_id, position, event and guess; `drafts`: those as well."""
        plain = "" if drafts else "where guess in (0, 3)"
        return self._text[side].format(drafts=" or guess = 2" if drafts else "") if side in self._text else plain


def find_differences(
    connection: Any, plan: ComparisonPlan, settings: DiffSettings, kept: Kept, *, whole: tuple[bool, bool]
) -> dict[str, int]:
    """Fill `firsts` and return how much was compared; `whole`: of each trace, whether nothing is missing."""
    sql = Statements(connection, "differences")
    sql.run("firsts")
    for side in SIDES:
        sql.run("facts", s=side, kept=kept.tokens(side, drafts=True))
    compared = {"tokens": sql.count("compared")}
    sql.run("places")
    listed = "array_to_string({}, ' or ')"
    moved = "array_to_string(list_transform({}, lambda x: x + r.position), ' or ')"
    for kind, where, a, b in (
        ("input", "a_tokens <> b_tokens", listed.format("r.a_tokens"), listed.format("r.b_tokens")),
        ("position", "a_offs <> b_offs", moved.format("r.a_offs"), moved.format("r.b_offs")),
        ("table", "other_wrongs", "''", "''"),
        ("context", "other_content", "''", "''"),
    ):
        sql.run("first_places", kind=kind, where=where, a=a, b=b)
    sql.run("sampled")
    compared["sampled"] = sql.count("common_samples")
    sql.run("prompts")
    if plan.kv:
        compared["kv"] = _compare_bytes(connection, sql, LEADING, kept, plan, settings.kv_tolerance, whole)
        for change in _changes():
            sql.run("changed", **change, whole=not settings.requests)  # of nobody's slots, too, if all are asked for
    if plan.kv and not plan.hand_over and any(sample.kv for sample in plan.samples):
        compared["layers"] = _compare_bytes(connection, sql, SAMPLED, kept, plan, settings.kv_tolerance, whole)
        for change, others_whole in zip(_changes(), whole[::-1], strict=True):
            if others_whole:  # else the same change may be lost
                sql.run("layer_changed", **change)
    sql.run("context")
    connection.execute("update firsts set kind = 'table' where kind = 'context'")
    return compared


class ByteFacts(NamedTuple):
    """KV bytes of tokens as the walk records them: the table of facts, the columns beside the request, and the kind of difference
    that they are; `where` is SQL that says which bytes of a token `r` differ.
    """

    facts: str
    key: tuple[str, ...]
    kind: str
    where: str


LEADING: Final = ByteFacts("kv", ("pool_group", "position"), "kv", "''")
SAMPLED: Final = ByteFacts(
    "layers",
    ("pool_group", "position", "half", "layer", "piece"),
    "layer",
    "r.half || ' of layer ' || r.layer || ', bytes ' || r.piece * 16 || ' to ' || r.piece * 16 + 15 || ': '",
)


def _compare_bytes(
    connection: Any,
    sql: Statements,
    of: ByteFacts,
    kept: Kept,
    plan: ComparisonPlan,
    tolerance: float | None,
    whole: tuple[bool, bool],
) -> int:
    names = {"facts": of.facts, "key": ", ".join(of.key)}
    for side in SIDES:
        # What is sent is what was written last; otherwise the first time a token is computed counts.
        which = "max" if plan.hand_over else "min"
        tokens = "where guess = 3" if plan.hand_over else kept.tokens(side, drafts=False)
        sql.run("bytes", s=side, kept=tokens, which=which, **names)
    differing = sql.text("byte_pairs", **names)
    for s, o, is_whole in (("a", "b", whole[0]), ("b", "a", whole[1])):
        same = " and ".join(f"t.{column} = {s}.{column}" for column in of.key)
        differing += "" if is_whole or plan.hand_over else "\n" + sql.text("not_again", s=s, o=o, same=same, **names)
    found = {"kind": of.kind, "where": of.where, "differing": f"differing_{of.facts}"}
    if tolerance is None:
        connection.execute(f"create temp view {found['differing']} as {differing}")
        sql.run("first_bytes", **found)
    else:
        schema: pa.Schema | None = None
        first: dict[int, dict[str, Any]] = {}
        for batch in connection.sql(differing).to_arrow_reader(65_536):
            schema = batch.schema
            for row in _beyond(batch, plan.kv_dtype, tolerance):
                known = first.get(row["pair"])
                if known is None or (row["b_event"], row["position"]) < (known["b_event"], known["position"]):
                    first[row["pair"]] = row
        if first and schema is not None:
            connection.register(found["differing"], pa.Table.from_pylist(list(first.values()), schema=schema))
            sql.run("first_bytes", **found)
    return sql.count("bytes_compared", **names)


def _changes() -> Iterator[dict[str, object]]:
    """Yield, for changes without a write in A and then in B alone, the values of a statement that finds the first."""
    here, nowhere, text = "r.event, r.forward", "-1, -1", "'slot ' || r.slot || ' changed'"
    none = "'no change'"
    yield {"s": "a", "o": "b", "at": AT_THE_END - 1, "a_place": here, "b_place": nowhere, "a": text, "b": none}
    yield {"s": "b", "o": "a", "at": "r.event", "a_place": nowhere, "b_place": here, "a": none, "b": text}


def _beyond(batch: pa.RecordBatch, dtype: str, tolerance: float) -> Iterator[dict[str, Any]]:
    """Yield the first row of each pair in a batch whose values differ by more than the tolerance."""
    lengths = np.array([len(value) for value in batch.column("a_bytes").to_pylist()])
    chosen: list[int] = []
    for width in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == width)
        sides = []
        for name in ("a_bytes", "b_bytes"):
            data = b"".join(batch.column(name).take(pa.array(rows)).to_pylist())
            sides.append(np.frombuffer(data, np.uint8).reshape(len(rows), width))
        chosen += rows[beyond(sides[0], sides[1], dtype, tolerance)].tolist()
    order = batch.take(pa.array(sorted(chosen), pa.int64()))
    seen: set[int] = set()
    for row in order.sort_by([("b_event", "ascending"), ("position", "ascending")]).to_pylist():
        if row["pair"] not in seen:
            seen.add(row["pair"])
            yield row
