"""The joins that compare what both traces saw beside tokens, tables and bytes: identities, windows, states and values.

What only one of them saw is compared with nothing, and said: the other may have had the same.
"""

from typing import Any, Final

from ...recorder.trace.schema import IDENTITY_KINDS, WRITTEN_VALUES
from .comparability import ComparisonPlan, seen_by_both
from .differences import SIDES, Kept
from .facts import Statements
from .walk import TraceTotals

# Kinds of identity whose names another run, and another engine, may give otherwise.
_RENAMED: Final = ("adapter", "media")
_SAID: Final = {  # of WRITTEN_VALUES
    "nan": "NaN",
    "infinite": "an infinity",
    "zeros": "zeros",
    "saturated": "saturated values",
}
_VALUE: Final = (
    "{kinds}[{of}.kind + 1] || ' in ' || if({of}.rows = 1, 'a row', {of}.rows || ' rows') || ' of ' || {of}.half || "
    "', first in layer ' || {of}.layer || if({of}.position = v.position, '', ' at position ' || {of}.position)"
)


def find_observed(
    connection: Any,
    plan: ComparisonPlan,
    kept: Kept,
    totals: tuple[TraceTotals, TraceTotals],
    compared: dict[str, int],
    notes: list[str],
    *,
    whole: bool,
) -> None:
    """Add to `firsts` what differs, to `compared` how much was compared, and to `notes` what was not; `whole`: of no trace
    anything is missing.
    """
    sql = Statements(connection, "observed")
    if _identities(sql, plan, notes):
        compared["identities"] = sql.count("identities_compared")
    if seen_by_both("positions that windows read", [walk.windows_seen for walk in totals], notes):
        sql.both("window_reads")
        sql.run("windows")
        compared["windows"] = sql.count("windows_compared")
    if plan.states[0]:
        sql.both("states")
        sql.run("state", whole=whole)
        compared["states"] = sql.count("states_compared")
    if any(sample.values for sample in plan.samples):
        _values(sql, kept, plan.value_kinds)


def _values(sql: Statements, kept: Kept, kinds: int) -> None:
    """Compare the values that no model writes, of the first `kinds` of `WRITTEN_VALUES`, and that either trace saw."""
    for side in SIDES:
        sql.run("values", s=side, kinds=kinds, kept=kept.tokens(side, drafts=False))
    if not sql.count("values_found"):
        return
    for side in SIDES:
        sql.run("values_computed", s=side, kept=kept.tokens(side, drafts=False))
    for side, other in (SIDES, SIDES[::-1]):
        said, others = (_VALUE.format(of=of, kinds=[_SAID[kind] for kind in WRITTEN_VALUES]) for of in ("v", "w"))
        zeros = WRITTEN_VALUES.index("zeros")
        sql.run("odd_values", s=side, o=other, zeros=zeros, said=said, others_said=others)
    sql.run("first_values")


def _identities(sql: Statements, plan: ComparisonPlan, notes: list[str]) -> bool:
    """Compare what the KV of requests depends on beside their tokens; return whether anything was compared."""
    sql.both("identities")
    declared = [{row["kind"] for row in sql.rows("identity_kinds", s=side)} for side in SIDES]
    if all(declared) and not plan.same_salt:
        notes.append(
            "what requests' KV depends on beside their tokens is not compared: names are hashed with other salts"
        )
        return False
    for side in (0, 1):
        alone = [name for kind, name in enumerate(IDENTITY_KINDS) if kind in declared[side] - declared[1 - side]]
        if alone:
            seen_by_both(f"{', '.join(alone)} of requests", [side == 0, side == 1], notes)
    if not declared[0] & declared[1]:
        return False
    sql.run("identity_spots")
    renamed = _RENAMED[: 1 if plan.same_engine else None]
    sql.run("identity_partners", renamed=", ".join(str(IDENTITY_KINDS.index(name)) for name in renamed))
    if count := sql.count("identities_renamed"):
        said = f"{count:,} values of {' or '.join(renamed)} are called otherwise in A than in B"
        notes.append(f"{said}: those that requests have together are taken for the same")
    sql.run("identity", kinds=list(IDENTITY_KINDS))
    return True
