"""What is observed of an incident's first sign, coded once: who held the slot, who filled it, what its row named.

Rules look for what one mechanism leaves behind. This looks from the other side, at what tells mechanisms apart; `likely.py`
says what follows from it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from ..cluster import Cluster
from ..facts import Fact
from ..sign import CONTENT, KV_HASH, POSITION, TOKEN, WRITE_POSITION, WRITE_TOKEN, Sign


class Held(Enum):
    """How a request came to the slot that it uses; the value says it in words."""

    UNKNOWN = ""
    OWN = "was given to it"
    JOINED = "was joined by it as cached"
    NEVER = "was never given to it"
    GAVE_UP = "was given back by it"
    FREED = "was given back, nobody says by whom, while it had it"
    EVICTED = "was evicted from the prefix cache since it had it"
    GIVEN_ANEW = "was given to another since it had it"
    TWICE = "was given to it while another had it"
    JOINED_GONE = "was joined by it as cached, when it was the cache's no longer"


class Filled(Enum):
    """What filled the slot last, since it was given to whoever uses it; the value says it in words."""

    UNKNOWN = ""
    NOBODY = "nothing has filled it since"
    ITSELF = "it wrote it for this very position"
    ITSELF_ELSEWHERE = "it wrote it for another position"
    OTHER = "another request wrote it"
    AS_CACHED = "it is as the prefix cache had it"
    COPY = "a copy filled it"
    LOAD = "a load or transfer filled it"
    NOT_LOADED = "a load of it left all its bytes as they were"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of the slot that the first sign with one names.

    `elsewhere`: the request wrote the position itself, to another slot. `enough`: it had been given slots for the position.
    `rewritten`: the row's entry was overwritten. `retracted`: the request had been put back. `off_row`: attention or the write
    used a slot that the row does not name. `positions`: a position was fed, or stands there, that is not the token's.
    """

    sign: Sign
    held: Held
    filled: Filled
    elsewhere: bool
    enough: bool
    rewritten: bool
    retracted: bool
    off_row: bool
    positions: bool
    fed: bool
    same_place: bool


def evidence_of(cluster: Cluster) -> Evidence:
    """Return what is observed of a cluster's first sign that is about a slot's content, or of its first."""
    head = cluster.head
    of_slots = [s for s in head if s.slot > 0 and s.bits & (CONTENT | KV_HASH)]
    of_slots = of_slots or [s for s in head if s.slot > 0 and s.request_id >= 0] or head[:1]
    sign = next((s for s in of_slots if not cluster.is_sliding(s)), of_slots[0])  # a full slot's history says more
    mine = [s for s in head if s.request_id == sign.request_id]
    own = cluster.wrote(sign)
    held = _held(cluster, sign)
    return Evidence(
        sign=sign,
        held=held,
        filled=_filled(cluster, sign, held),
        elsewhere=own is not None and own[1] != sign.slot and not cluster.is_sliding(sign),
        enough=cluster.enough(sign),
        rewritten=cluster.rewrite_of(sign) is not None,
        retracted=cluster.facts.retracted_before(sign.request_id, sign.event),
        off_row=any(s.kind in ("attention_slots", "table_entry_differs") for s in mine),
        positions=any(s.bits & (POSITION | WRITE_POSITION) or s.kind == "table_entry_differs" for s in mine),
        same_place=len({s.position for s in head}) > 1
        and all(s.bits == TOKEN or s.kind == "hit_differs" for s in head)
        and sign.position % max(1, cluster.groups[0].page_size if cluster.groups else 1) == 0,
        fed=any(s.bits & (WRITE_TOKEN | WRITE_POSITION) for s in head),
    )


def _held(cluster: Cluster, sign: Sign) -> Held:
    if not cluster.has_trace or sign.request_id < 0 or sign.slot <= 0:
        return Held.UNKNOWN
    history = cluster.history(sign)
    if sign.kind == "read_after_free" and not cluster.complete:  # it has read it before
        last = cluster.last(sign, "free", "evict")
        return Held.EVICTED if last is not None and last.what == "evict" else Held.FREED
    held = Held.NEVER if history or cluster.complete else Held.UNKNOWN
    # Whom it was given to last and who has it still; whether the cache has given it up, and whether nobody has it since.
    holder, gone, free = -1, False, False
    again, own = cluster.facts.retracted_before(sign.request_id, sign.event), cluster.wrote(sign)
    wrote = own[0] if own is not None and own[1] == sign.slot else sign.event
    for fact in history:
        mine, holds = fact.request_id == sign.request_id, held in _HOLDS
        lost = held in (Held.EVICTED, Held.GAVE_UP, Held.FREED)
        if mine and lost and wrote < fact.event and not again and fact.what != "shared":
            continue  # given anew while it ran, for another position: what it wrote there before is lost all the same
        if fact.what == "alloc":
            twice = (
                holds and not again if mine and holder == sign.request_id else cluster.allocations_told and holder != -1
            )
            held = (Held.TWICE if twice else Held.OWN) if mine else Held.GIVEN_ANEW if holds else held
            holder, free = fact.request_id, False
            gone &= cluster.tells_shares  # else the cache may have been given it since
        elif fact.what == "shared" and mine:
            held = Held.JOINED_GONE if gone or free else Held.JOINED
        elif fact.what in ("cached", "loaded", "received", "copied"):
            gone = free = False
        elif fact.what == "let_go" and holds:
            held = Held.GAVE_UP if mine else Held.FREED
        elif fact.what in ("free", "evict"):
            gone, free, holder = gone or fact.what == "evict", True, -1
            if holds and (fact.what == "evict" or mine or fact.request_id < 0):
                held = Held.EVICTED if fact.what == "evict" else Held.GAVE_UP if mine else Held.FREED
    return held


def _filled(cluster: Cluster, sign: Sign, held: Held) -> Filled:
    if not cluster.has_trace or sign.slot <= 0:
        return Filled.UNKNOWN
    filled, given = cluster.filled(sign), cluster.last(sign, "alloc")
    own = cluster.wrote(sign)
    since = own[0] if own is not None else -1
    loads = [at for at in cluster.facts.loads.get(sign.request_id, ()) if since < at <= sign.event]
    if cluster.not_loaded(sign) is not None:
        return Filled.NOT_LOADED
    now = cluster.last(sign, "loaded")
    if sign.kind == "copy_differs" and now is not None and now.event == sign.event:
        return Filled.LOAD
    if filled is not None and filled.what in ("loaded", "received", "receive_failed"):
        return Filled.LOAD  # its slots may be recorded as given behind the load itself
    if held in _HOLDS and given is not None and (filled is None or filled.event < given.event):
        return Filled.LOAD if loads else Filled.NOBODY
    if filled is None:
        return Filled.NOBODY if sign.bits & CONTENT and sign.writer_event < 0 else Filled.UNKNOWN
    if filled.what == "copied":
        return Filled.COPY
    if filled.request_id == sign.request_id:
        here = own == (filled.event, sign.slot)
        return Filled.ITSELF if here else Filled.ITSELF_ELSEWHERE
    joined = cluster.last(sign, "shared", "cached")
    as_cached = held is Held.JOINED and joined is not None and filled.event < joined.event
    # Whoever only joined it had nothing to write there.
    had = next((f for f in reversed(cluster.history(sign)) if _comes_to(f, filled)), None)
    return Filled.AS_CACHED if as_cached and (had is None or had.what == "alloc") else Filled.OTHER


def _comes_to(fact: Fact, filled: Fact) -> bool:
    return fact.request_id == filled.request_id and fact.event <= filled.event and fact.what in ("alloc", "shared")


_HOLDS: Final = (Held.OWN, Held.JOINED, Held.TWICE, Held.JOINED_GONE)
