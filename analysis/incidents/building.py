"""From clusters and their judgements to rows of `incidents.parquet`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...kernels.constants import FailReason, LaunchTag
from .case import KV_HASH, Judgement
from .facts import Facts
from .merging import kind_of
from .ranking import Ranked
from .rules import RULES, UNKNOWN
from .schema import MAX_LISTED
from .sites import FINDING, VIOLATION, Sites
from .words import group_name, place, reader, request_query, slot_query, when, writer_name

Int64Array = npt.NDArray[np.int64]

HIGH, MEDIUM, LOW = "high", "medium", "low"
_HIGH_FROM: Final = 0.8
_MEDIUM_FROM: Final = 0.6
MAX_ALTERNATIVES: Final = 3


def confidence(score: float) -> str:
    """Return a score in words."""
    return HIGH if score >= _HIGH_FROM else MEDIUM if score >= _MEDIUM_FROM else LOW


def incident_rows(
    sites: Sites, clusters: Int64Array, incidents: Int64Array, ranked: Sequence[Ranked], facts: Facts
) -> list[dict[str, Any]]:
    """Return one row an incident, in their order.

    Args:
        sites: the report's places.
        clusters: each place's cluster.
        incidents: each cluster's incident.
        ranked: the judged clusters, the first ones.
        facts: what the trace tells.
    """
    of_site = incidents[clusters]
    order = np.argsort(of_site, kind="stable")
    bounds = np.searchsorted(of_site[order], np.arange(int(incidents.max()) + 2))
    rows = []
    for number in range(len(bounds) - 1):
        mine = order[bounds[number] : bounds[number + 1]]
        judged = [one for cluster, one in enumerate(ranked) if incidents[cluster] == number]
        rows.append({"incident": number + 1, **_spread(sites, mine, facts), **_what(number + 1, judged, len(mine))})
    return rows


def _what(number: int, judged: Sequence[Ranked], places: int) -> dict[str, Any]:
    """What an incident is: by its earliest cluster, which the others follow from."""
    found: dict[str, Any] = {
        "kind": UNKNOWN,
        "title": "unknown",
        "score": 0.0,
        "alternatives": [],
        "alternative_scores": [],
        "mode": "",
        "cause_event": -1,
        "first_request": "",
        "in_slot": "",
        "expected": "",
        "sentence": f"{places:,} places were found damaged; too many clusters were, to judge each",
        "detail": "",
        "evidence": _queries(number, None, -1, -1, -1),
    }
    if judged:
        best = judged[0]
        kind, judgement = kind_of(best)
        first = best.case.first
        also = sum(kind_of(other)[0] == kind for other in judged[1:])
        found |= {
            "kind": kind,
            "title": RULES[kind].title if kind != UNKNOWN else "unknown",
            "score": judgement.score if judgement is not None else (best.kinds[0][1].score if best.kinds else 0.0),
            "alternatives": [other for other, _ in best.kinds[:MAX_ALTERNATIVES]],
            "alternative_scores": [round(other.score, 3) for _, other in best.kinds[:MAX_ALTERNATIVES]],
            "mode": first.mode,
            "cause_event": judgement.cause_event if judgement is not None else -1,
            **_first_sign(best),
            "sentence": _sentence(judgement, best, also),
            "detail": RULES[kind].mechanism if kind != UNKNOWN else "",
            "evidence": _queries(number, judgement, best.case.group(first), first.slot, first.request_id),
        }
    found["score"] = round(found["score"], 3)
    found["confidence"] = confidence(found["score"]) if found["kind"] != UNKNOWN else LOW
    return found


def _first_sign(best: Ranked) -> dict[str, str]:
    """The first sign in words; a violation's, where there is one, since it knows what stands in the slot."""
    case = best.case
    sign = next((sign for sign in case.head if sign.bits), case.first)
    asked = f"{reader(sign)}" + (f", position {sign.position}" if sign.position >= 0 else "")
    words = {
        "first_request": asked if sign.request_id >= 0 or sign.mode == "sweep" else "",
        "in_slot": "",
        "expected": "",
    }
    if sign.slot > 0:
        words["in_slot"] = f"{sign.slot:,}" + (f" of {group_name(case, sign)}" if sign.group >= 0 else "")
    if sign.bits and sign.writer_event >= 0:
        done = (
            "written now"
            if sign.writer_event == sign.event
            else f"written in forward {sign.writer_forward:,} by {writer_name(sign)}"
        )
        words["in_slot"] += f": token {sign.stored_token}, position {sign.stored_position}, {done}"
    elif sign.bits:
        words["in_slot"] += ", never written in this trace"
    if sign.bits & ~KV_HASH:
        token = f"token {sign.expected_token}, " if sign.expected_token != -1 else ""
        words["expected"] = f"{token}position {sign.position}"
    elif sign.bits:
        words["expected"] = "the KV bytes that were written"
    return words


def _sentence(judgement: Judgement | None, best: Ranked, also: int) -> str:
    first = best.case.first
    if judgement is None:
        what = first.kind.replace("_", " ") or "+".join(r.name or "" for r in FailReason if first.bits & r)
        said = f"no rule knows this: {what} in {when(first)}, {reader(first)}, {place(first)}"
        said += f", {first.detail}" if first.detail else ""
    else:
        said = judgement.sentence
    said = said[0].upper() + said[1:]
    return f"{said}; the same {also} more time{'s' if also > 1 else ''}" if also else said


def _queries(number: int, judgement: Judgement | None, group: int, slot: int, request_id: int) -> list[str]:
    queries = [f"select * from incident_violations where incident = {number} order by event, number limit 50"]
    queries.append(f"select * from incident_findings where incident = {number} order by event, number limit 50")
    queries.append(f"from blast_radius(incident := {number})")
    if judgement is not None:
        queries += judgement.evidence
    if slot > 0:
        queries.append(slot_query(group, slot))
    if request_id >= 0:
        queries.append(request_query(request_id))
    return list(dict.fromkeys(queries))


def _spread(sites: Sites, mine: Int64Array, facts: Facts) -> dict[str, Any]:
    first = int(mine[0])
    requests, at = np.unique(sites["request"][mine], return_index=True)
    requests = requests[np.argsort(at, kind="stable")]
    requests = requests[requests >= 0]
    listed = requests[:MAX_LISTED].tolist()
    slots = _slots(sites, mine, facts)
    runs = _runs(slots)
    launches = np.bitwise_or.reduce(sites["launches"][mine])
    runners = np.bitwise_or.reduce(sites["runners"][mine])
    rows, sources = sites["rows"][mine], sites["source"][mine]
    names = Counter[str]()
    for source, what in np.unique(np.stack([sources, sites["what"][mine]], axis=1), axis=0).tolist():
        chosen = (sources == source) & (sites["what"][mine] == what)
        names[_name(source, what, sites)] += int(rows[chosen].sum())
    return {
        "first_forward": int(sites["forward"][first]),
        "last_forward": int(sites["last_forward"][mine].max()),
        "first_event": int(sites["event"][first]),
        "time_ns": int(sites["time_ns"][first]),
        "requests": [sites.names.get(request) or str(request) for request in listed],
        "request_ids": listed,
        "num_requests": len(requests),
        "slots": runs[:MAX_LISTED],
        "num_slots": len(slots),
        "groups": np.unique(sites["group"][mine][sites["group"][mine] >= 0]).tolist(),
        "halves": sorted({tag.name.split("_")[1] for tag in LaunchTag if launches >> tag & 1}),
        "runners": [runner for runner in range(62) if runners >> runner & 1],
        "violations": int(rows[sources == VIOLATION].sum()),
        "findings": int(rows[sources == FINDING].sum()),
        "seen_by": [name for name, _ in names.most_common()],
    }


def _name(source: int, what: int, sites: Sites) -> str:
    if source == FINDING:
        return sites.kinds[what]
    return "+".join(reason.name or "" for reason in FailReason if what & reason) or "NONE"


def _slots(sites: Sites, mine: Int64Array, facts: Facts) -> Int64Array:
    """Return `[n, 2] int64`, pool group and slot, of all that was named, each once."""
    own = np.stack([sites["group"][mine], sites["slot"][mine]], axis=1)
    parts = [own[own[:, 1] > 0]]
    if facts.named:
        chosen = mine[(sites["source"][mine] == FINDING) & np.isin(sites["event"][mine], list(facts.named))]
        for place_ in chosen.tolist():
            group = int(sites["group"][place_])
            slots = facts.named[int(sites["event"][place_])].get(group)
            if slots is not None:
                parts.append(np.stack([np.full(len(slots), group), slots], axis=1))
    return np.unique(np.concatenate(parts), axis=0)


def _runs(slots: Int64Array) -> list[dict[str, int]]:
    if not len(slots):
        return []
    new = np.ones(len(slots), np.bool_)
    new[1:] = (slots[1:, 0] != slots[:-1, 0]) | (slots[1:, 1] != slots[:-1, 1] + 1)
    starts = np.flatnonzero(new)
    counts = np.diff(np.append(starts, len(slots)))
    return [
        {"pool_group": int(slots[s, 0]), "start": int(slots[s, 1]), "count": int(n)}
        for s, n in zip(starts[: MAX_LISTED + 1], counts, strict=False)
    ]
