"""From clusters to clusters, and from each cluster to its kinds, ranked."""

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...kernels.arrays import Int64Array
from ...replayer.report.findings import ADDED_COLUMNS, uncounted
from .cluster import Cluster, Diagnosis
from .facts import Facts
from .places import FINDING, Places, count_rows, open_parquet, require_columns
from .rules import RULES
from .seen.evidence import evidence_of
from .seen.likely import KNOWN, Likely, branch_of, judged_again, left_open
from .sign import Sign

# Clusters past these are not judged one by one; they go with a judged one of the same signs.
MAX_CLUSTERS: Final = 256
SIGNS_A_CLUSTER: Final = 64

_TEXT: Final = ("request", "mode", "writer_request", "detail", "kind", "cause", "evidence")
# A sign's fields by the columns of either file.
_BOTH: Final = {name: name for name in ("event", "forward", "runner", "group", "request_id", "request", "slot")} | {
    "row": "req_pool_idx"
}
_WRITER: Final = ("writer_event", "writer_forward", "writer_request_id", "writer_request")
_FIELDS: Final = {
    "violations": {name: name for name in ("mode", "stored_token", "expected_token", "last_forward", *_WRITER)}
    | {"bits": "fail_reason_bits", "position": "expected_position", "stored_position": "position"},
    "findings": {name: name for name in ("kind", "position", "count", "detail", "evidence", "cause", "expected_token")}
    | {"stored_token": "token"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One cluster's kinds, best first, each with its diagnosis; `cluster` is what they were judged by.

    `likely` is what the evidence says without any rule. With a score below `least` a kind is not said to be known.
    """

    cluster: Cluster
    kinds: tuple[tuple[str, Diagnosis], ...]
    likely: Likely
    least: float = KNOWN


def make_clusters(report: Path, places: Places, clusters: Int64Array, facts: Facts) -> list[Cluster]:
    """Return the earliest `MAX_CLUSTERS` clusters, with their earliest rows as they stand in the report, in their order.

    `clusters` is each place's. Raise `AnalysisError` if the report's files are damaged.
    """
    total = min(int(clusters.max()) + 1, MAX_CLUSTERS) if len(clusters) else 0
    members: list[list[int]] = [[] for _ in range(total)]
    kinds: list[Counter[str]] = [Counter() for _ in range(total)]
    reasons: list[Counter[int]] = [Counter() for _ in range(total)]
    order = np.flatnonzero(clusters < total)
    seen: set[tuple[int, int, int]] = set()  # the first of each kind is there, however many others come before
    for (cluster, source, what), count in count_rows(places, order, clusters[order]):
        if source == FINDING:
            kinds[cluster][places.kinds[what]] += count
        else:
            reasons[cluster][what] += count
    keys = zip(clusters[order].tolist(), places["source"][order].tolist(), places["what"][order].tolist(), strict=True)
    for i, key in zip(order.tolist(), keys, strict=True):
        if len(members[key[0]]) < SIGNS_A_CLUSTER or key not in seen:
            members[key[0]].append(i)
            seen.add(key)
    wanted = np.array(sorted({i for mine in members for i in mine}), np.int64)
    signs: dict[int, Sign] = {}
    for source, (name, fields) in enumerate(_FIELDS.items()):
        mine = wanted[places["source"][wanted] == source]
        signs |= _read_signs(report / f"{name}.parquet", mine, places["row"][mine], _BOTH | fields, facts.modes)
    return [
        Cluster(signs=[signs[i] for i in members[c]], kinds=kinds[c], reasons=reasons[c], facts=facts)
        for c in range(total)
    ]


def rank(cluster: Cluster, without: Collection[str] = ()) -> Ranked:
    """Judge a cluster by every rule, or all but those of certain kinds: what is then said is what a mistake unknown gets."""
    seen = evidence_of(cluster)
    likely = branch_of(cluster, seen)
    rules = ((kind, rule.branch, rule.diagnose(cluster)) for kind, rule in RULES.items() if kind not in without)
    found = [(kind, judged_again(kind, branch, of, cluster, likely)) for kind, branch, of in rules if of is not None]
    left = {kind: of for kind, of in left_open(found, cluster, seen, likely) if kind not in without}
    # What a rule is unsure of and the evidence leaves is as likely as that, and is said in the rule's words.
    known = [(kind, replace(of, score=max(of.score, left[kind].score)) if kind in left else of) for kind, of in found]
    found = known + [(kind, of) for kind, of in left.items() if kind not in dict(known)]
    found.sort(key=lambda item: -item[1].score)  # stable: what stands first in the list of rules stays first
    return Ranked(cluster=cluster, kinds=tuple(found), likely=likely)


def _read_signs(
    path: Path, places: Int64Array, rows: Int64Array, fields: dict[str, str], modes: dict[int, str]
) -> dict[int, Sign]:
    """Read single rows of a report's file, `{place: sign}`; only the row groups that hold them."""
    if not len(places):
        return {}
    found: dict[int, Sign] = {}
    with open_parquet(path) as file:
        there = {*file.schema_arrow.names} | {*fields.values()} - ADDED_COLUMNS
        fields = {ours: theirs for ours, theirs in fields.items() if theirs in there}
        require_columns(path, file, fields.values())
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]).astype(np.int64)
        of_group = np.searchsorted(starts, rows, side="right") - 1
        for group in np.unique(of_group).tolist():
            at = np.flatnonzero(of_group == group)
            table = file.read_row_group(group, columns=list(dict.fromkeys(fields.values())))
            chosen = table.take(pa.array(rows[at] - starts[group])).to_pylist()
            for place, row in zip(places[at].tolist(), chosen, strict=True):
                found[place] = _sign({ours: row[theirs] for ours, theirs in fields.items()}, modes)
    return found


def _sign(values: dict[str, Any], modes: dict[int, str]) -> Sign:
    """A row as a sign; what a report never holds, nulls and texts that are no list of numbers, count as nothing."""
    facts: dict[str, Any] = {}
    for name, value in values.items():
        if name == "evidence":
            facts[name] = _numbers(value)
        elif name in _TEXT:
            facts[name] = str(value or "")
        else:
            facts[name] = -1 if value is None else int(value)
    if facts.get("detail"):
        facts["detail"] = uncounted(facts["detail"], facts["count"])
    facts.setdefault("bits", 0)
    facts.setdefault("kind", "")
    facts.setdefault("mode", modes.get(facts["event"], ""))
    return Sign(**facts)


def _numbers(text: Any) -> tuple[int, ...]:
    try:
        found = json.loads(text or "[]")
    except (ValueError, TypeError, RecursionError):
        return ()
    return tuple(n for n in found if isinstance(n, int))[:64] if isinstance(found, list) else ()
