"""What an incident's lead cluster looks like, as words: what bugs that are alike have in common, whatever made them."""

import inspect
from collections.abc import Callable
from typing import Any, Final

from ..cluster import Cluster
from ..sign import Sign
from . import observed
from .evidence import Evidence
from .likely import Likely

Traits = frozenset[str]

# All that `observed` can say of a cluster, or of one of its signs.
_OBSERVED: Final[dict[str, Callable[..., Any]]] = {
    name: function
    for name, function in inspect.getmembers(observed, inspect.isfunction)
    if function.__module__ == observed.__name__ and not name.startswith("_")
}
_FLAGS: Final = ("elsewhere", "enough", "rewritten", "retracted", "off_row", "positions", "fed", "same_place")
_BITS: Final = 8


def traits_of(cluster: Cluster, seen: Evidence, likely: Likely) -> Traits:
    """Return what is observed of a cluster: no numbers of requests, slots and events, and no names of its own."""
    sign, head = seen.sign, cluster.head
    found = {f"held: {seen.held.name}", f"filled: {seen.filled.name}", f"branch: {likely.branch}"}
    found |= {f"likely {n}: {kind}" for n, kind in enumerate(likely.kinds)}
    found |= {name for name in _FLAGS if getattr(seen, name)}
    found |= {trait for one in head for trait in _of_sign(one)}
    found |= {f"sign: {_name(one)}" for one in cluster.signs} | {f"first: {_name(cluster.first)}"}
    found |= {f"slot: {fact.what} {_whose(fact.request_id, sign)}" for fact in cluster.history(sign)}
    found |= _of_beginning(cluster, sign) | _of_change(cluster, sign)
    either = {
        "one sign": len(head) == 1,
        "several requests": len({one.request_id for one in head}) > 1,
        "sliding": any(cluster.is_sliding(one) for one in head),
        "window": cluster.window(sign) > 0,
        "the pool's last slot": _last_slot(cluster, sign),
        "padding went nowhere": any(event <= sign.event for event in cluster.facts.padding_nowhere),
        "may be a fork": cluster.has_trace and cluster.forked(sign),
        "complete history": cluster.complete,
        "shares told": cluster.tells_shares,
        "writer: nobody": sign.writer_event < 0,
        f"writer: {_whose(sign.writer_request_id, sign)}": sign.writer_event >= 0,
    }
    either |= {f"observed: {name}": _observed(function, cluster, sign) for name, function in _OBSERVED.items()}
    return frozenset(found | {name for name, there in either.items() if there})


def _of_sign(sign: Sign) -> list[str]:
    found = [f"mode: {sign.mode}", *(f"reason {bit}" for bit in range(_BITS) if sign.bits >> bit & 1)]
    if sign.kind:
        found += [f"finding: {sign.kind}", f"finding: {sign.kind}, {sign.cause}"]
    return found


def _of_beginning(cluster: Cluster, sign: Sign) -> set[str]:
    """Return where the sign's position lies in what its request began with, and how far it is from what stands there."""
    found = set()
    begin = cluster.facts.begins.get(sign.request_id)
    if begin is not None:
        computed = begin.prefix_len + begin.extend_len
        found.add("prefix" if sign.position < begin.prefix_len else "prompt" if sign.position < computed else "answer")
        found |= {"in its first forward"} if begin.event == sign.event else set()
    status = cluster.facts.status_before(sign.request_id, sign.event)
    found |= {f"status: {status.status}"} if status is not None else set()
    if sign.bits and sign.stored_position >= 0:
        apart = sign.stored_position - sign.position
        found.add(f"positions apart: {apart if abs(apart) <= 1 else 'back' if apart < 0 else 'ahead'}")
    return found


def _of_change(cluster: Cluster, sign: Sign) -> set[str]:
    """Return what is known of the last change of the slot's bytes without a write: whose bytes came, and how many slots changed."""
    change = cluster.last(sign, "changed")
    if change is None:
        return set()
    twin, _ = change.twin
    whose = "nobody's" if twin < 0 else "this pool's" if twin == cluster.group(sign) else "another pool's"
    emptied = {"changed: to zeros"} if change.emptied else set()
    behind = {"changed: behind a copy"} if change.behind >= 0 else set()
    many = f"changed: {'one slot' if change.together <= 1 else 'several slots'}"
    return {f"changed: to {whose}", many} | emptied | behind


def _last_slot(cluster: Cluster, sign: Sign) -> bool:
    group = cluster.group(sign)
    return 0 <= group < len(cluster.groups) and sign.slot == cluster.groups[group].num_slots - 1


def _name(sign: Sign) -> str:
    return sign.kind or f"reasons {sign.bits}"


def _whose(request_id: int, sign: Sign) -> str:
    return "its own" if request_id == sign.request_id else "nobody's" if request_id < 0 else "another's"


def _observed(function: Callable[..., Any], cluster: Cluster, sign: Sign) -> bool:
    said = function(cluster) if len(inspect.signature(function).parameters) == 1 else function(cluster, sign)
    return said is not None and said is not False and said != [] and said != 0
