"""From clusters and their diagnoses to rows of `incidents.parquet`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.constants import FailReason, LaunchTag
from .alike import KnownBugs, second_opinion
from .cluster import Diagnosis, request_query, slot_query
from .facts import Facts
from .linking import kind_of
from .places import FINDING, VIOLATION, Places, count_rows
from .ranking import Ranked
from .rules import RULES, UNKNOWN
from .schema import MAX_LISTED
from .seen.likely import CERTAIN
from .sign import CONTENT, KV_HASH

HIGH, MEDIUM, LOW = "high", "medium", "low"
_HIGH_FROM: Final = 0.8
_MEDIUM_FROM: Final = 0.6
MAX_ALTERNATIVES: Final = 3
# What would show a kind, for those that evidence leaves open beside another.
_SHOWN_BY: Final = {
    "commit_beyond_allocation": "an allocation for this position that is missing",
    "copy_failed": "a source whose bytes the slot does not hold",
    "double_free": "a second free of the slot",
    "eviction_of_locked_page": "an eviction after the request had joined the slot",
    "failed_load_counted_loaded": "a load that failed or left no bytes",
    "fork_copy_missing": "a parent whose page was to be copied",
    "free_too_early": "a free of the slot before its request was done",
    "future_map_overrun": "samples that come later than they are used",
    "async_resume_wrong_input": "a resume before the wrong token",
    "hit_before_written": "an entry in the prefix cache that is older than the write",
    "host_copy_overwritten": "a second store to the host slot before the load",
    "kv_changed": "a change of bytes that no write, copy or load goes with",
    "groups_alias": "the same bytes written in another group",
    "load_of_other_prefix": "the tokens for which the storage had it",
    "page_given_twice": "an allocation of the slot while it was held",
    "position_off": "the positions that the model was fed",
    "prefix_not_computed": "a count of computed tokens that is older than the slots",
    "radix_insert_then_free": "a free of the slot under the prefix cache",
    "req_to_token": "a row that names a slot that was not given for this position",
    "resume_overwrites_tail": "slots of the row that leak when it is overwritten",
    "row_reassigned_in_flight": "a row that another request has",
    "scheduled_after_retraction": "nothing given to the request since it was put back",
    "shared_page_written": "a write into a page that others had joined",
    "slot_mapping": "a write that went to another slot than the row names",
    "stale_prefix_hit": "an eviction of the slot before it was joined",
    "tokens_truncated_hash_kept": "two prompts with one key",
    "window_read_wrong": "the positions that attention read",
    "attention_seq_len_wrong": "the length that attention got",
    "attention_table_overwritten": "the slots that attention got",
}


def confidence(score: float) -> str:
    """Return a score in words."""
    return HIGH if score >= _HIGH_FROM else MEDIUM if score >= _MEDIUM_FROM else LOW


def incident_rows(
    places: Places,
    clusters: Int64Array,
    incidents: Int64Array,
    ranked: Sequence[Ranked],
    facts: Facts,
    known: KnownBugs,
) -> list[dict[str, Any]]:
    """Return one row an incident, in their order.

    `clusters` says each place's cluster, `incidents` each cluster's incident; `ranked` are the first ones, judged by rules,
    `known` the bugs that they are compared with.
    """
    of_place = incidents[clusters]
    parts = np.split(np.argsort(of_place, kind="stable"), np.cumsum(np.bincount(of_place))[:-1])
    rows = []
    for number, mine in enumerate(parts):
        judged = [one for cluster, one in enumerate(ranked) if incidents[cluster] == number]
        what = _judged(number + 1, judged, known) if judged else _unjudged(number + 1, len(mine))
        rows.append({"incident": number + 1, **_spread(places, mine, facts), **what})
    return rows


def _unjudged(number: int, places: int) -> dict[str, Any]:
    return {
        "kind": UNKNOWN,
        "title": "unknown",
        "branch": "",
        "score": 0.0,
        "alternatives": [],
        "alternative_scores": [],
        "mode": "",
        "cause_event": -1,
        **dict.fromkeys(("first_request", "in_slot", "expected"), ""),
        "sentence": f"{places:,} places were found damaged; too many clusters were, to judge each",
        "detail": "",
        "evidence": _queries(number),
        "confidence": LOW,
        "alike": [],
    }


def _judged(number: int, judged: Sequence[Ranked], known: KnownBugs) -> dict[str, Any]:
    """What an incident is: by its earliest cluster, which the others follow from."""
    by_rules = kind_of(judged[0])[0]
    best, alike = second_opinion(judged[0], known)
    cluster, first, ranks = best.cluster, best.cluster.first, best.kinds[:MAX_ALTERNATIVES]
    kind, diagnosis = kind_of(best)
    branch = RULES[kind].branch if kind != UNKNOWN else best.likely.branch
    score = round(diagnosis.score if diagnosis is not None else ranks[0][1].score if ranks else 0.0, 3)
    also = sum(kind_of(other)[0] == by_rules for other in judged[1:])
    queries = [*diagnosis.evidence] if diagnosis is not None else []
    queries += [slot_query(cluster.group(first), first.slot)] if first.slot > 0 else []
    queries += [request_query(first.request_id)] if first.request_id >= 0 else []
    return {
        "kind": kind,
        "title": RULES[kind].title if kind != UNKNOWN else f"{branch}: unknown kind" if branch else "unknown",
        "branch": branch,
        "score": score,
        "alternatives": [other for other, _ in ranks],
        "alternative_scores": [round(other.score, 3) for _, other in ranks],
        "mode": first.mode,
        "cause_event": diagnosis.cause_event if diagnosis is not None else -1,
        **_first_sign(best),
        "sentence": _sentence(diagnosis, best, also),
        "detail": RULES[kind].mechanism if kind != UNKNOWN else "",
        "evidence": _queries(number, queries),
        "confidence": confidence(score) if kind != UNKNOWN else LOW,
        "alike": [one._asdict() for one in alike],
    }


def _first_sign(best: Ranked) -> dict[str, str]:
    """The first sign in words; a violation's, where there is one, since it knows what stands in the slot."""
    cluster = best.cluster
    sign = next((sign for sign in cluster.head if sign.bits), cluster.first)
    asked = f"{sign.reader}" + (f", position {sign.position}" if sign.position >= 0 else "")
    words = {
        "first_request": asked if sign.request_id >= 0 or sign.mode == "sweep" else "",
        "in_slot": "",
        "expected": "",
    }
    if sign.slot > 0:
        words["in_slot"] = f"{sign.slot:,}" + (f" of {cluster.group_name(sign)}" if sign.group >= 0 else "")
    if sign.bits and sign.writer_event >= 0:
        done = f"written in forward {sign.writer_forward:,} by {sign.writer_name}"
        done = "written now" if sign.writer_event == sign.event else done
        words["in_slot"] += f": token {sign.stored_token}, position {sign.stored_position}, {done}"
    elif sign.bits:
        words["in_slot"] += ", never written in this trace"
    if sign.bits & ~KV_HASH:
        token = f"token {sign.expected_token}, " if sign.expected_token != -1 else ""
        words["expected"] = f"{token}position {sign.position}"
    elif sign.bits:
        words["expected"] = "the KV bytes that were written"
    return words


def _sentence(diagnosis: Diagnosis | None, best: Ranked, also: int) -> str:
    first = best.cluster.first
    said = first.differs if diagnosis is None else diagnosis.sentence
    said = said[0].upper() + said[1:]
    held = next((s for s in best.cluster.head if s.bits & CONTENT and s.writer_event >= 0), None)
    if held is not None and "written by" not in said:  # who wrote what was read
        where = "it" if f"slot {held.slot} " in said else f"slot {held.slot}"
        said += f"; {where} holds token {held.stored_token}, position {held.stored_position}, written by {held.writer}"
    others = [kind for kind, _ in best.kinds[1:MAX_ALTERNATIVES] if kind in _SHOWN_BY]
    if others and best.cluster.has_trace and best.kinds[0][1].score < CERTAIN:
        said += "; it may also be " + ", or ".join(
            f"{RULES[kind].title}, which {_SHOWN_BY[kind]} would show" for kind in others
        )
    return f"{said}; the same {also} more time{'s' if also > 1 else ''}" if also else said


def _queries(number: int, more: Sequence[str] = ()) -> list[str]:
    """The queries that prove an incident: those of every one, and its own."""
    rows = "select * from incident_{} where incident = {} order by event, number limit 50"
    own = [rows.format(name, number) for name in ("violations", "findings")]
    return list(dict.fromkeys([*own, f"from blast_radius(incident := {number})", *more]))


def _spread(places: Places, mine: Int64Array, facts: Facts) -> dict[str, Any]:
    first = int(mine[0])
    requests, at = np.unique(places["request"][mine], return_index=True)
    requests = requests[np.argsort(at, kind="stable")]
    requests = requests[requests >= 0]
    listed = requests[:MAX_LISTED].tolist()
    slots = _slots(places, mine, facts)
    runs = _runs(slots)
    launches = np.bitwise_or.reduce(places["launches"][mine])
    runners = np.bitwise_or.reduce(places["runners"][mine])
    rows, sources = places["rows"][mine], places["source"][mine]
    names = Counter[str]()
    for (_, source, what), count in count_rows(places, mine, np.zeros_like(mine)):
        names[_name(source, what, places)] += count
    return {
        "first_forward": int(places["forward"][first]),
        "last_forward": int(places["last_forward"][mine].max()),
        "first_event": int(places["event"][first]),
        "time_ns": int(places["time_ns"][first]),
        "requests": [places.names.get(request) or str(request) for request in listed],
        "request_ids": listed,
        "num_requests": len(requests),
        "slots": runs[:MAX_LISTED],
        "num_slots": len(slots),
        "groups": np.unique(places["group"][mine][places["group"][mine] >= 0]).tolist(),
        "halves": sorted({tag.name.split("_")[1] for tag in LaunchTag if launches >> tag & 1}),
        "runners": [runner for runner in range(62) if runners >> runner & 1],
        "violations": int(rows[sources == VIOLATION].sum()),
        "findings": int(rows[sources == FINDING].sum()),
        "seen_by": [name for name, _ in names.most_common()],
    }


def _name(source: int, what: int, places: Places) -> str:
    if source == FINDING:
        return places.kinds[what]
    return "+".join(reason.name or "" for reason in FailReason if what & reason) or "NONE"


def _slots(places: Places, mine: Int64Array, facts: Facts) -> Int64Array:
    """Return `[n, 2] int64`, pool group and slot, of all that was named, each once."""
    parts = [np.stack([places["group"][mine], places["slot"][mine]], axis=1)]
    named = mine[(places["source"][mine] == FINDING) & np.isin(places["event"][mine], list(facts.named))]
    for group, event in zip(places["group"][named].tolist(), places["event"][named].tolist(), strict=True):
        slots = facts.named[event].get(group, parts[0][:0, 1])
        parts.append(np.stack([np.full(len(slots), group), slots], axis=1))
    found = np.unique(np.concatenate(parts), axis=0)
    return found[found[:, 1] > 0]


def _runs(slots: Int64Array) -> list[dict[str, int]]:
    if not len(slots):
        return []
    follows = (slots[1:, 0] == slots[:-1, 0]) & (slots[1:, 1] == slots[:-1, 1] + 1)
    starts = np.flatnonzero(np.append(True, ~follows))
    counts = np.diff(np.append(starts, len(slots)))
    return [
        {"pool_group": int(slots[s, 0]), "start": int(slots[s, 1]), "count": int(n)}
        for s, n in zip(starts[: MAX_LISTED + 1], counts, strict=False)
    ]
