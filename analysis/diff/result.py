"""What a comparison found, in one value."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from ...recorder.trace.header import TraceHeader
from .comparability import ComparisonPlan, largest_difference
from .facts import Statements, number
from .pairing import Pairing, Timing
from .settings import KV_DTYPES
from .walk import TraceTotals

EQUAL_UP_TO_HERE: Final = "inputs and tables are equal up to here: look at attention metadata, weights, adapters"
SAME, DIFFERENT, INCONCLUSIVE = "same", "different", "inconclusive"
EXIT_CODES: Final = {SAME: 0, DIFFERENT: 1, INCONCLUSIVE: 125}
MAX_LISTED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a request differs in one way: `request` in A, `partner` in B; "" or -1 if there is none."""

    kind: str
    request: str
    partner: str
    runner: int
    position: int
    a_forward: int
    a_event: int
    b_forward: int
    b_event: int
    a: str
    b: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffResult:
    """The comparison of two traces; `requests` that differ, in that order, each with its first difference of each kind."""

    a: str
    b: str
    headers: tuple[dict[str, Any], dict[str, Any]]
    settings: dict[str, Any]
    pairing: Pairing
    totals: tuple[TraceTotals, TraceTotals]
    compared: dict[str, int]
    counts: dict[str, int]
    counted: frozenset[str]
    num_different: int
    requests: tuple[tuple[Difference, ...], ...]
    timing: Timing
    notes: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        """The first difference of all."""
        return self.requests[0][0] if self.requests else None

    @property
    def hint(self) -> str:
        """Where to look if what was computed differs first, and not what it was computed from; "" if it does not."""
        return EQUAL_UP_TO_HERE if self.first is not None and self.first.kind in ("kv", "layer", "sampled") else ""

    @property
    def doubts(self) -> list[str]:
        """Why traces without a difference may yet differ."""
        doubts = []
        for name, walk in zip("AB", self.totals, strict=True):
            doubts += [f"{name}: {doubt}" for doubt in walk.doubts[:5]]
            if len(walk.doubts) > 5:
                doubts.append(f"{name}: and {len(walk.doubts) - 5:,} more")
            if not walk.complete and not walk.doubts:
                doubts.append(f"{name} has no end: it was torn, or is still being written")
        if not any(self.compared.values()):
            doubts.append("nothing of the requests that both traces have could be compared")
        return doubts

    @property
    def verdict(self) -> str:
        """Different if anything that counts differs, inconclusive if anything is in doubt, else same."""
        if self.requests:
            return DIFFERENT
        return INCONCLUSIVE if self.doubts else SAME

    @property
    def exit_code(self) -> int:
        """0 same, 1 different, 125 inconclusive."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        sides = zip((self.a, self.b), self.headers, self.totals, strict=True)
        a, b = ({"trace": trace, **header, **totals.to_json()} for trace, header, totals in sides)
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "a": a,
            "b": b,
            "settings": self.settings,
            "align": asdict(self.pairing),
            "compared": self.compared,
            "different_requests": self.num_different,
            "counts": self.counts,
            "first": None if self.first is None else asdict(self.first),
            "hint": self.hint,
            "requests": [[asdict(difference) for difference in request] for request in self.requests[:MAX_LISTED]],
            "timing": self.timing.to_json(),
            "notes": list(self.notes),
            "doubts": self.doubts,
        }


class Wording:
    """Says what a row of `firsts` means; looks into the facts where the row does not say enough."""

    def __init__(self, connection: Any, headers: tuple[TraceHeader, TraceHeader], plan: ComparisonPlan) -> None:
        self._connection, self._headers, self._plan = connection, headers, plan

    def difference(self, row: dict[str, Any]) -> Difference:
        """Return a row of `firsts` as a value."""
        a, b, words = self._words(row)
        missing = row["kind"] == "missing"
        places = ("a_forward", "a_event", "b_forward", "b_event")
        return Difference(
            kind=row["kind"],
            request=row["a" if missing else "a_label"],
            partner=row["b" if missing else "b_label"],
            runner=row["runner"],
            position=row["position"],
            **{name: row[name] if row[name] is not None else -1 for name in places},
            a=a,
            b=b,
            words=words,
        )

    def _words(self, row: dict[str, Any]) -> tuple[str, str, str]:
        kind, position, a, b = row["kind"], row["position"], row["a"] or "", row["b"] or ""
        runner = self._headers[1].runners[row["runner"]].name if row["runner"] > 0 else ""
        where = f"position {position}" + (f" of the {runner}" if runner else "")
        if kind == "table":
            return self._table(row, where)
        if kind == "kv":
            return self._kv(row, a, b)
        if kind in ("window", "values", "layer"):
            where += f" in pool {self._headers[1].groups[self._plan.groups[1][row['pool_group']].index].name}"
        if kind == "state":
            where = f"position {position} in {self._headers[1].states[self._plan.states[1][row['pool_group']]].name}"
        nobody = not row["a_label"] or position < 0
        subject = "KV bytes of a slot of no request of both traces" if nobody else f"KV bytes of {where}"
        fed = f"at {where} the model was fed token {a} in A, {b} in B"
        words = {
            "missing": f"only in {'A' if a else 'B'}",
            "input": "the prompts differ" if position < 0 else fed,
            "identity": f"the KV of {where} was computed with {a} in A, {b} in B",
            "window": f"computing {where}: A reads {a}, B {b}",
            "state": f"the recurrent state behind {where} differs: A {a}, B {b}",
            "values": f"computing {where}: {a} in A, {b} in B",
            "layer": f"KV bytes of {where} differ: {a} in A, {b} in B",
            "layer_changed": f"{subject} changed in a later layer after they were written: {a} in A, {b} in B",
            "position": f"the token of {where} was fed at position {a} in A, {b} in B",
            "sampled": f"for {where} token {a} was sampled in A, {b} in B",
            "kv_changed": f"{subject} changed after they were written: {a} in A, {b} in B",
            "length": f"ended after {a} in A, after {b} in B",
            "hit": f"{a} of the prompt came from the prefix cache in A, {b} in B",
        }
        return a, b, words.get(kind, f"A: {a}; B: {b}")

    def _table(self, row: dict[str, Any], where: str) -> tuple[str, str, str]:
        sides = [self._misread(row, side) for side in ("a", "b")]
        if not any(sides):
            return "", "", f"{where} was computed after other content in A than in B"
        said = "; ".join(f"{name} {text}" for name, text in zip("AB", sides, strict=True) if text)
        a, b = (side or "reads its own tokens" for side in sides)
        return a, b, f"computing {where}: {said}"

    def _misread(self, row: dict[str, Any], side: str) -> str:
        request_id = number(self._connection, f"select {side}_id from pairs where pair = {row['pair']}")
        asked = [request_id, row["runner"], row[f"{side}_event"]]
        found = Statements(self._connection, "differences").rows("misread", asked, s=side)
        if not found:
            return ""
        [wrong] = found
        holds = f"which holds position {wrong['writer_position']} of request {wrong['writer_label'] or wrong['writer']}"
        if wrong["state"]:
            holds = wrong["state"]
        elif wrong["writer"] == request_id:
            holds = f"which holds its own position {wrong['writer_position']} with other content"
        return f"reads position {wrong['position']} in slot {wrong['slot']}, {holds}"

    def _kv(self, row: dict[str, Any], a: str, b: str) -> tuple[str, str, str]:
        mine, theirs = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in (a, b))
        group = self._headers[1].groups[self._plan.groups[1][row["pool_group"]].index]
        differing = int((mine != theirs).sum())
        words = f"{differing} of {len(mine)} KV bytes of position {row['position']} in pool {group.name} differ"
        if self._plan.kv_dtype in KV_DTYPES and len(mine) == len(theirs):
            apart = largest_difference(mine[None], theirs[None], self._plan.kv_dtype)
            words += f", by up to {apart:.3g} ({self._plan.kv_dtype})"
        return a.lower(), b.lower(), words
