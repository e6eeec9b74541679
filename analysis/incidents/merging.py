"""Clusters that one mistake made, as one incident.

A cluster is what hangs together by slots and requests. One mistake may leave several: it names one event as the cause of
all; or it lies in code that runs again and again; or the damage travels on, through a request that read it, to other
slots, where nothing begins by itself.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from .cluster import Diagnosis
from .places import Places
from .ranking import Ranked
from .rules import RULES, UNKNOWN

# Below this nothing is said to be known.
KNOWN: Final = 0.45
# A later cluster whose own cause is less certain than this, and that shares a request, follows from the earlier one.
CERTAIN: Final = 0.9
# A recurring mistake that was seen before explains an uncertain cluster that it would score this with.
POSSIBLE: Final = 0.3


def kind_of(ranked: Ranked) -> tuple[str, Diagnosis | None]:
    """Return the best kind and its diagnosis; `UNKNOWN` where nothing speaks clearly."""
    if ranked.kinds and ranked.kinds[0][1].score >= KNOWN:
        return ranked.kinds[0]
    return UNKNOWN, None


def certain(ranked: Ranked) -> bool:
    """Whether something surely begins in a cluster."""
    kind, diagnosis = kind_of(ranked)
    return diagnosis is not None and diagnosis.score >= CERTAIN and not RULES[kind].aftermath


def merge(ranked: Sequence[Ranked], places: Places, clusters: Int64Array) -> Int64Array:
    """Return each cluster's incident, `[clusters] int64`, numbered from 0 in order of their first events.

    Clusters past the judged ones go with a judged one of the same first sign.
    """
    total = int(clusters.max()) + 1 if len(clusters) else 0
    parent = list(range(len(ranked)))
    requests = _requests(places, clusters, len(ranked))
    by_cause: dict[tuple[str, int], int] = {}
    by_kind: dict[str, int] = {}
    by_event: dict[int, list[int]] = {}
    for number, one in enumerate(ranked):
        kind, diagnosis = kind_of(one)
        same = []
        if kind != UNKNOWN and RULES[kind].recurs:
            same.append(by_kind.setdefault(kind, number))
        if diagnosis is not None and diagnosis.cause_event >= 0:
            same.append(by_cause.setdefault((kind, diagnosis.cause_event), number))
        if diagnosis is not None and diagnosis.follows_event >= 0:
            same += [other for other in by_event.get(diagnosis.follows_event, ()) if other < number]
        if not certain(one):
            same += [by_kind[k] for k, j in one.kinds if k in by_kind and j.score >= POSSIBLE]
        if all(other == number for other in same):
            follows = _follows(number, ranked, parent, requests)
            if follows is not None:
                same.append(follows)
        for event in {sign.event for sign in one.cluster.signs}:
            by_event.setdefault(event, []).append(number)
        for other in same:
            _join(parent, number, other)
    roots = [_root(parent, number) for number in range(len(ranked))]
    labels = np.full(total, -1, np.int64)
    labels[: len(ranked)] = roots
    if total > len(ranked):
        _place_the_rest(labels, len(ranked), places, clusters)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _follows(
    number: int, ranked: Sequence[Ranked], parent: list[int], requests: Sequence[frozenset[int]]
) -> int | None:
    """Return the earlier cluster that this one follows from: one that shares a request, if nothing begins here."""
    kind, _ = kind_of(ranked[number])
    begins = certain(ranked[number])
    for earlier in range(number):
        if not requests[number] & requests[earlier]:
            continue
        if not begins or kind == kind_of(ranked[_root(parent, earlier)])[0]:
            return earlier
    return None


def _requests(places: Places, clusters: Int64Array, total: int) -> list[frozenset[int]]:
    found: list[set[int]] = [set() for _ in range(total)]
    mine = (clusters < total) & (places["request"] >= 0)
    pairs = np.unique(np.stack([clusters[mine], places["request"][mine]], axis=1), axis=0)
    for cluster, request in pairs.tolist():
        found[cluster].add(request)
    return [frozenset(one) for one in found]


def _place_the_rest(labels: Int64Array, judged: int, places: Places, clusters: Int64Array) -> None:
    """Give clusters that were not judged to the earliest incident with the same first sign, else make them one."""
    _, first = np.unique(clusters, return_index=True)
    by_sign: dict[tuple[int, int, int], int] = {}
    for cluster, at in enumerate(first.tolist()):
        sign = int(places["source"][at]), int(places["what"][at]), int(places["group"][at])
        if cluster < judged:
            by_sign.setdefault(sign, int(labels[cluster]))
        else:
            labels[cluster] = by_sign.get(sign, judged)


def _root(parent: list[int], number: int) -> int:
    while parent[number] != number:
        parent[number] = parent[parent[number]]
        number = parent[number]
    return number


def _join(parent: list[int], one: int, other: int) -> None:
    low, high = sorted((_root(parent, one), _root(parent, other)))
    parent[high] = low
