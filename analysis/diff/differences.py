"""The joins that find, for each pair of requests and each kind, the first place where the two traces part.

Every statement adds to the table `firsts`. `seen` is the event of B at which the difference shows, by which differences
are ordered; `AT_THE_END` where it shows only when a request, or the trace, is over.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from .comparability import ComparisonPlan, beyond
from .facts import Statements, number
from .settings import DiffSettings

AT_THE_END: Final = 1 << 62


def find_differences(
    connection: Any, plan: ComparisonPlan, settings: DiffSettings, *, whole: tuple[bool, bool]
) -> dict[str, int]:
    """Fill `firsts` and return how much was compared; `whole`: of each trace, whether nothing is missing."""
    sql = Statements(connection, "differences")
    sql.run("firsts")
    kept: dict[str, str] = {}
    for side in ("a", "b"):
        kept[side] = ""
        if number(connection, f"select count(*) from {side}_tokens where guess = 1"):
            sql.run("kept_guesses", s=side)
            kept[side] = sql.text("with_kept", s=side, drafts="{drafts}")
        sql.run("facts", s=side, kept=kept[side].format(drafts=" or guess = 2"))
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
        compared["kv"] = _compare_kv(connection, sql, kept, plan, settings.kv_tolerance, whole)
        _compare_changes(sql, everything=not settings.requests)
    sql.run("context")
    connection.execute("update firsts set kind = 'table' where kind = 'context'")
    return compared


def _compare_kv(
    connection: Any,
    sql: Statements,
    kept: dict[str, str],
    plan: ComparisonPlan,
    tolerance: float | None,
    whole: tuple[bool, bool],
) -> int:
    for side in ("a", "b"):
        settled = kept[side].format(drafts="") or "where guess in (0, 3)"
        # What is sent is what was written last; otherwise the first time a token is computed counts.
        which = "max" if plan.hand_over else "min"
        sql.run("kv", s=side, kept="where guess = 3" if plan.hand_over else settled, which=which)
    differing = sql.text("kv_pairs")
    for s, o, is_whole in (("a", "b", whole[0]), ("b", "a", whole[1])):
        differing += "" if is_whole or plan.hand_over else "\n" + sql.text("not_again", s=s, o=o)
    if tolerance is None:
        connection.execute(f"create temp view differing as {differing}")
        sql.run("first_kv", differing="differing")
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
            connection.register("differing", pa.Table.from_pylist(list(first.values()), schema=schema))
            sql.run("first_kv", differing="differing")
    return number(connection, "select count(*) from a_bytes semi join b_bytes using (pair, pool_group, position)")


def _compare_changes(sql: Statements, *, everything: bool) -> None:
    """Compare changes without a write; with `everything` those to a slot of nobody's count, too."""
    here, nowhere, text = "r.event, r.forward", "-1, -1", "'slot ' || r.slot || ' changed'"
    end, none = str(AT_THE_END - 1), "'no change'"
    sql.run("changed", s="a", o="b", at=end, a_place=here, b_place=nowhere, a=text, b=none, whole=everything)
    sql.run("changed", s="b", o="a", at="r.event", a_place=nowhere, b_place=here, a=none, b=text, whole=everything)


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
