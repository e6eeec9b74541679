"""Places that hang together: over pages, over a request's neighbouring positions, over one event.

Two places belong together when they lie in one page (the unit that allocators hand out), when one request has them at
neighbouring positions (the chain carries damage on), when one request was hit in both by the same event, or when one
forward was fed something wrong in both, or read from no slot at all. Time and causes are looked at later, when each
cluster's kind is known.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.constants import FailReason
from ...recorder.trace.header import PoolGroup
from .cluster import Diagnosis
from .places import FINDING, Places
from .ranking import Ranked
from .rules import RULES, UNKNOWN

# A draft's records stand one position further on.
_NEIGHBOUR: Final = 1
_ANY: Final = 1 << 62
# Kinds of slot numbers: those of block tables are even, those of groups behind a full-to-SWA table odd.
_SPACES: Final = 4096
_FED: Final = ("input_not_truth", "input_not_sampled", "position_not_place", "padding_slot_read")


class NamedSlots(NamedTuple):
    """Further slots of place `place`, `[n] int64` of one pool group.

    They are the slots that the event behind a finding names, or the full slots through which a sliding-window slot was
    written.
    """

    place: int
    group: int
    slots: Int64Array


def link(places: Places, groups: Sequence[PoolGroup], named: Sequence[NamedSlots]) -> Int64Array:
    """Return each place's cluster, `[n] int64`, numbered from 0 in order of their first events."""
    nodes = [page_nodes(places["group"], places["slot"], groups)]
    nodes += [page_nodes(np.full(len(n.slots), n.group), n.slots, groups) for n in named]
    place = np.concatenate([np.arange(len(places)), *(np.full(len(n.slots), n.place) for n in named)])
    node = np.concatenate(nodes)
    mine, fed = np.flatnonzero(places["request"] >= 0), np.flatnonzero(_is_input(places))
    placed = mine[places["position"][mine] >= 0]
    reach = max(_NEIGHBOUR, 1 << places.shift)
    edges = (
        _consecutive(place[node >= 0], node[node >= 0], place[node >= 0], reach=_ANY),
        _consecutive(mine, places["request"][mine], places["event"][mine], reach=0),
        _consecutive(fed, np.zeros_like(fed), places["event"][fed], reach=0),
        _consecutive(placed, places["request"][placed], places["position"][placed], reach=reach),
    )
    a, b = (np.concatenate([edge[side] for edge in edges]) for side in (0, 1))
    return np.unique(components(len(places), a, b), return_inverse=True)[1].astype(np.int64)


def page_nodes(group: Int64Array, slot: Int64Array, groups: Sequence[PoolGroup]) -> Int64Array:
    """Return a number for each slot's page, `[n] int64`, -1 if no slot is meant.

    Groups that share a block table share their slots' numbers and so their pages; a group behind a full-to-SWA table has
    its own. Group -1 means the first block table's slots, -2 the second's, and so on. A group that the header does not
    have, or none at hand, has pages of one slot.
    """
    node = np.full(len(slot), -1, np.int64)
    valid = (slot > 0) & (slot < 1 << 40)
    node[valid] = slot[valid] * _SPACES + (2 * group[valid] + 1) % _SPACES
    for number, known in enumerate(groups):
        at = valid & (group == number)
        space = 2 * known.table if known.lut < 0 else 2 * number + 1
        node[at] = (slot[at] - known.slot_shift) // max(1, known.page_size) * _SPACES + space % _SPACES
    for table in {known.table for known in groups}:
        at = valid & (group == -1 - table)
        size = max(1, *(known.page_size for known in groups if known.table == table))
        shift = max(known.slot_shift for known in groups if known.table == table)
        node[at] = (slot[at] - shift) // size * _SPACES + 2 * table % _SPACES
    return node


def components(count: int, a: Int64Array, b: Int64Array) -> Int64Array:
    """Return for each of `count` nodes the smallest node that edges `(a, b)` connect it with."""
    label = np.arange(count, dtype=np.int64)
    while len(a):
        low, high = np.minimum(label[a], label[b]), np.maximum(label[a], label[b])
        apart = low != high
        if not apart.any():
            break
        a, b = a[apart], b[apart]
        np.minimum.at(label, high[apart], low[apart])
        while not np.array_equal(label, label[label]):
            label = label[label]
    return label


def _is_input(places: Places) -> BoolArray:
    """Whether a place is about what the model was fed, or would be if a row had named a slot, `[n] bool`."""
    kinds = [number for number, kind in enumerate(places.kinds) if kind in _FED]
    written = int(FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION)
    fed = np.isin(places["what"], np.array(kinds, np.int64))
    return np.asarray(np.where(places["source"] == FINDING, fed, (places["what"] & written) != 0))


def _consecutive(
    place: Int64Array, first: Int64Array, second: Int64Array, *, reach: int
) -> tuple[Int64Array, Int64Array]:
    """Edges between places whose first keys are the same, and whose second ones differ by `reach` at most."""
    order = np.lexsort((second, first))
    place, first, second = place[order], first[order], second[order]
    # Nothing here is larger than it looks: hostile numbers that wrap around come out negative.
    distance = second[1:] - second[:-1]
    near = (first[1:] == first[:-1]) & (distance >= 0) & (distance <= reach)
    return place[:-1][near], place[1:][near]


# A later cluster whose own cause is less certain than this, and that shares a request, follows from the earlier one.
CERTAIN: Final = 0.9
# A slot's users counted wrong is one mistake: it is given back or evicted too early here, twice or never there, or given out while held.
COUNTS: Final = frozenset(
    {"free_too_early", "double_free", "page_given_twice", "eviction_of_locked_page", "page_leaked"}
)
# A recurring mistake that was seen before explains an uncertain cluster that it would score this with.
POSSIBLE: Final = 0.3


def kind_of(ranked: Ranked) -> tuple[str, Diagnosis | None]:
    """Return the best kind and its diagnosis; `UNKNOWN` where nothing speaks clearly."""
    if ranked.kinds and ranked.kinds[0][1].score >= ranked.least:
        return ranked.kinds[0]
    return UNKNOWN, None


def _mistake(kind: str) -> str:
    """Return one word for all kinds that one mistake shows as."""
    return "count" if kind in COUNTS else kind


def certain(ranked: Ranked) -> bool:
    """Whether something surely begins in a cluster."""
    kind, diagnosis = kind_of(ranked)
    return diagnosis is not None and diagnosis.score >= CERTAIN and not RULES[kind].aftermath


def merge(ranked: Sequence[Ranked], places: Places, clusters: Int64Array) -> Int64Array:
    """Return each cluster's incident, `[clusters] int64`, numbered from 0 in order of their first events.

    Clusters past the judged ones go with a judged one of the same first sign.
    """
    total = int(clusters.max()) + 1 if len(clusters) else 0
    root = list(range(len(ranked)))  # of each, the earliest that it belongs to
    requests = _requests(places, clusters, len(ranked))
    by_kind: dict[str, int] = {}
    by_event: dict[int, list[int]] = {}
    by_cause: dict[int, int] = {}
    by_slot: dict[tuple[int, int], int] = {}
    for number, one in enumerate(ranked):
        kind, diagnosis = kind_of(one)
        same = [by_cause[event] for event in _given_back(one) if event in by_cause]
        same += [by_slot[place] for place in _copied_from(one) if place in by_slot]
        if diagnosis is not None and diagnosis.cause_event >= 0:
            by_cause.setdefault(diagnosis.cause_event, number)
        if diagnosis is not None:  # a mistake in code comes back whenever that runs
            same.append(by_kind.setdefault(_mistake(kind), number))
        if diagnosis is not None and diagnosis.follows_event >= 0:
            same += [other for other in by_event.get(diagnosis.follows_event, ()) if other < number]
        if not certain(one):
            possible = (_mistake(k) for k, j in one.kinds if j.score >= POSSIBLE)
            same += [by_kind[k] for k in possible if k in by_kind]
        if all(other == number for other in same):
            # It follows from an earlier cluster that shares a request, if nothing begins here.
            shared = (other for other in range(number) if requests[number] & requests[other])
            follows = (other for other in shared if not certain(one) or kind == kind_of(ranked[root[other]])[0])
            same += [other for other in [next(follows, None)] if other is not None]
        for event in {sign.event for sign in one.cluster.signs}:
            by_event.setdefault(event, []).append(number)
        for place in {(sign.group, sign.slot) for sign in one.cluster.signs}:
            by_slot.setdefault(place, number)
        for other in same:
            low, high = sorted((root[number], root[other]))
            root = [low if it == high else it for it in root]
    labels = np.full(total, -1, np.int64)
    labels[: len(ranked)] = root
    if total > len(ranked):
        _place_the_rest(labels, len(ranked), places, clusters)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _copied_from(ranked: Ranked) -> list[tuple[int, int]]:
    """Return the slot, with its pool group, of which a cluster's first sign has a copy: what it holds may be that slot's damage."""
    sign = ranked.cluster.first
    fact = ranked.cluster.filled(sign)
    return [(sign.group, fact.via)] if fact is not None and fact.what == "copied" and fact.via >= 0 else []


def _given_back(ranked: Ranked) -> list[int]:
    """Return the events that gave back the slot of a cluster's first sign, since which it was given out once at most."""
    found: list[int] = []
    for fact in ranked.cluster.history(ranked.cluster.first):
        if fact.what == "free":
            found.append(fact.event)
        elif fact.what == "alloc":
            found = found[-1:]
    return found


def _requests(places: Places, clusters: Int64Array, total: int) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(total)]
    mine = (clusters < total) & (places["request"] >= 0)
    pairs = np.unique(np.stack([clusters[mine], places["request"][mine]], axis=1), axis=0)
    for cluster, request in pairs.tolist():
        found[cluster].add(request)
    return found


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
