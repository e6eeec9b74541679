"""A divergence in words."""

from typing import Any

from ...recorder.trace.header import TraceHeader
from .comparability import Plan
from .kv_values import KV_DTYPES, largest_difference
from .result import Divergence

_MISREAD = """
select m.*, coalesce(k.label, '') as writer_label from {s}_misreads as m left join {s}_known as k
on k.request_id = m.writer where m.request_id = ? and m.runner = ? and m.event = ? limit 1
"""


class Wording:
    """Says what a row of `firsts` means; looks into the facts where the row does not say enough."""

    def __init__(self, connection: Any, headers: tuple[TraceHeader, TraceHeader], plan: Plan) -> None:
        self._connection = connection
        self._headers = headers
        self._plan = plan

    def divergence(self, row: dict[str, Any]) -> Divergence:
        """Return a row of `firsts` as a value."""
        a, b, words = self._words(row)
        labels = row["a_label"], row["b_label"]
        if row["kind"] == "missing":
            labels = row["a"], row["b"]
        return Divergence(
            kind=row["kind"],
            request=labels[0],
            partner=labels[1],
            runner=row["runner"],
            position=row["position"],
            a_forward=row["a_forward"] if row["a_forward"] is not None else -1,
            a_event=row["a_event"] if row["a_event"] is not None else -1,
            b_forward=row["b_forward"] if row["b_forward"] is not None else -1,
            b_event=row["b_event"] if row["b_event"] is not None else -1,
            a=a,
            b=b,
            words=words,
        )

    def _words(self, row: dict[str, Any]) -> tuple[str, str, str]:
        kind, position, a, b = row["kind"], row["position"], row["a"] or "", row["b"] or ""
        runner = self._headers[1].runners[row["runner"]].name if row["runner"] > 0 else ""
        where = f"position {position}" + (f" of the {runner}" if runner else "")
        if kind == "missing":
            return a, b, f"only in {'A' if a else 'B'}"
        if kind == "input":
            if position < 0:
                return a, b, "the prompts differ"
            return a, b, f"at {where} the model was fed token {a} in A, {b} in B"
        if kind == "position":
            return a, b, f"the token of {where} was fed at position {a} in A, {b} in B"
        if kind == "table":
            return self._table(row, where)
        if kind == "sampled":
            return a, b, f"for {where} token {a} was sampled in A, {b} in B"
        if kind == "kv":
            return self._kv(row, a, b)
        if kind == "kv_changed":
            whose = (
                f"KV bytes of {where}"
                if row["a_label"] and position >= 0
                else "KV bytes of a slot of no request of both traces"
            )
            return a, b, f"{whose} changed after they were written: {a} in A, {b} in B"
        if kind == "length":
            return a, b, f"ended after {a} in A, after {b} in B"
        if kind == "hit":
            return a, b, f"{a} of the prompt came from the prefix cache in A, {b} in B"
        return a, b, f"A: {a}; B: {b}"

    def _table(self, row: dict[str, Any], where: str) -> tuple[str, str, str]:
        sides = [self._misread(row, side) for side in ("a", "b")]
        if not any(sides):
            return "", "", f"{where} was computed after other content in A than in B"
        told = [side or "reads its own tokens" for side in sides]
        return (
            told[0],
            told[1],
            f"computing {where}: "
            + "; ".join(f"{name} {text}" for name, text in zip("AB", sides, strict=True) if text),
        )

    def _misread(self, row: dict[str, Any], side: str) -> str:
        event = row[f"{side}_event"]
        query = f"select {side}_id from pairs where pair = ?"
        request_id = self._connection.execute(query, [row["pair"]]).fetchone()[0]
        result = self._connection.execute(_MISREAD.format(s=side), [request_id, row["runner"], event])
        names = [column[0] for column in result.description]
        found = result.fetchone()
        if found is None:
            return ""
        wrong = dict(zip(names, found, strict=True))
        if wrong["state"]:
            holds = wrong["state"]
        elif wrong["writer"] == request_id:
            holds = f"which holds its own position {wrong['writer_position']} with other content"
        else:
            holds = (
                f"which holds position {wrong['writer_position']} of request {wrong['writer_label'] or wrong['writer']}"
            )
        return f"reads position {wrong['position']} in slot {wrong['slot']}, {holds}"

    def _kv(self, row: dict[str, Any], a: str, b: str) -> tuple[str, str, str]:
        import numpy as np

        mine, theirs = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in (a, b))
        group = self._headers[1].groups[self._plan.groups[1][row["pool_group"]].index]
        differing = int((mine != theirs).sum())
        words = f"{differing} of {len(mine)} KV bytes of position {row['position']} in pool {group.name} differ"
        if self._plan.kv_dtype in KV_DTYPES and len(mine) == len(theirs):
            apart = largest_difference(mine[None], theirs[None], self._plan.kv_dtype)
            words += f", by up to {apart:.3g} ({self._plan.kv_dtype})"
        return a.lower(), b.lower(), words
