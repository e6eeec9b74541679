"""A keyframe: all that a replay would hold at one point of a recording, as events of bounded size.

It begins with an event that says what is not an array, continues with the requests that are still named and with the
rows in use of every array, and ends with an event that says that it is whole.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array, record_words
from ...kernels.constants import RECORD_KV_HASH, KvHashMode
from ...kernels.replay_pass.ledger import JOINER, OWNER
from ..capture.host_arrays import runs_to_slots
from ..trace.event import TraceEvent
from ..trace.schema import KEYFRAME_BEGIN, KEYFRAME_END, KEYFRAME_FORWARD, KEYFRAME_PART, KEYFRAME_REQUEST
from .apply import RecordedState
from .history import FED_COLUMNS, ROW_REQUEST, STATUS_REQUEST, FedForward, ReplayState, SlotHistory
from .pools import GroupPool, Tier
from .requests import IDENTITY_COLUMNS
from .tables import StateTables

WORDS = 4  # of a canary record, the KV hash the last


_Named = tuple[str, npt.NDArray[Any]]


class KeyframeLabels(msgspec.Struct, kw_only=True):
    """What a keyframe holds that is not an array, as JSON in the labels of its first event."""

    truth_fill: Literal[0, -1]
    ran: list[int]
    decoded: bool
    since_sweep: int
    any_unknown: list[bool]
    last_forward: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
    had_gap: bool
    from_start: bool


class Rows(NamedTuple):
    """What a keyframe holds of one array, seen as a line of rows: `starts`, `counts` `[n] int64` are runs of them."""

    name: str
    array: npt.NDArray[Any]
    starts: Int64Array
    counts: Int64Array


def rows_in_use(recorded: RecordedState) -> Iterator[Rows]:
    """Yield what a keyframe holds of each array, in the order in which it must be put back."""
    state, use, history = recorded.state, recorded.use, recorded.history
    filled = {f"table.{number}": ends for number, ends in enumerate(use.ends)} | {"truth": use.truth_ends}
    for name, array in _table_arrays(state.tables):
        if name in filled:
            rows = np.flatnonzero(filled[name])
            width = len(array) // max(1, len(filled[name]))
            yield Rows(name, array, rows * width, filled[name][rows])
        else:
            yield _nonzero(name, array)
    for pool in state.pools:
        for tier, name in tiers(pool):
            yield from _record_rows(pool, tier, name)
            yield from (_nonzero(*one) for one in _tier_arrays(tier, name))
    yield from (_nonzero(*one) for one in _history_arrays(history))
    ended = np.array(list(history.ended.items()), np.int64).reshape(-1, 2)
    for name, array in (("ended", ended), ("dropped", history.dropped.rows())):
        yield Rows(name, array, np.zeros(1, np.int64), np.array([len(array)]))


def tiers(pool: GroupPool) -> list[tuple[Tier, str]]:
    """Return the tiers that have slots, with how their arrays' names begin."""
    named = [(pool.pool, f"pool.{pool.index}"), (pool.host, f"host.{pool.index}")]
    return [(tier, name) for tier, name in named if len(tier.writers)]


def _record_rows(pool: GroupPool, tier: Tier, name: str) -> Iterator[Rows]:
    """Yield the records of a tier: those of the first half's TAIL, and what is other than they in the rest."""
    first, *others = pool.group.halves
    base = record_words(tier.tail[first], written=False)
    yield _nonzero(f"{name}.records", base)
    for half in others:
        words = record_words(tier.tail[half], written=False)
        hashes = words[:, RECORD_KV_HASH]
        yield _nonzero(f"{name}.hashes.{half}", hashes)
        yield _chosen(f"{name}.tail.{half}", words, _differ(words, base, hashes))
    for half in pool.group.halves:
        words = record_words(tier.head[half], written=False)
        yield _chosen(f"{name}.head.{half}", words, _differ(words, base, None))
    for half, whole in tier.whole_hashes.items():
        yield _nonzero(f"{name}.whole_hashes.{half}", whole)


def places(state: ReplayState, kv_hash_mode: KvHashMode) -> dict[str, npt.NDArray[Any]]:
    """Return where each array of a keyframe goes, but for those of `pool.G` and `host.G` records, `ended` and `dropped`."""
    found = dict(_table_arrays(state.tables))
    for tier, name in (one for pool in state.pools for one in tiers(pool)):
        for half, records in tier.tail.items():
            found[f"{name}.tail.{half}"] = record_words(records, written=True)
            found[f"{name}.hashes.{half}"] = found[f"{name}.tail.{half}"][:, RECORD_KV_HASH]
            if kv_hash_mode is KvHashMode.ALL:  # comes behind the other one, and takes its place
                found[f"{name}.whole_hashes.{half}"] = found[f"{name}.hashes.{half}"]
            elif tier.whole_hashes:
                found[f"{name}.whole_hashes.{half}"] = tier.whole_hashes[half]
        found |= {f"{name}.head.{half}": record_words(r, written=True) for half, r in tier.head.items()}
        found |= _tier_arrays(tier, name)
    return found | dict(_history_arrays(state.history) if state.history is not None else ())


def _table_arrays(tables: StateTables) -> Iterator[_Named]:
    yield from ((f"table.{number}", table.reshape(-1)) for number, table in enumerate(tables.req_to_token))
    yield from ((f"lut.{number}", lut) for number, lut in enumerate(tables.luts))
    if tables.truth is not None:
        yield "truth", tables.truth.reshape(-1)


def _tier_arrays(tier: Tier, name: str) -> Iterator[_Named]:
    """Yield the arrays of a tier but for its records."""
    yield from ((f"{name}.kv.{number}", data) for number, data in enumerate(tier.kv))
    yield f"{name}.writers", tier.writers
    yield f"{name}.unknown", tier.unknown
    yield f"{name}.chain_starts", tier.chain_starts


def _history_arrays(history: SlotHistory) -> Iterator[_Named]:
    for number, (ledger, transfers) in enumerate(zip(history.ledger.rows, history.ledger.transfers, strict=True)):
        yield f"ledger.{number}", ledger
        yield f"transfers.{number}", transfers
    yield from ((f"rows.{number}", last) for number, last in enumerate(history.rows.last))
    yield "status", history.rows.status
    yield "samples", history.samples.last
    if history.states.slots:
        yield from ((f"states.{number}", slots) for number, slots in enumerate(history.states.slots))
        yield "chains", history.states.chains
        yield "cleared", history.states.cleared


def _differ(words: Int64Array, base: Int64Array, hashes: Int64Array | None) -> npt.NDArray[np.bool_]:
    """Say which records are not the base's with KV hash `hashes`, `[n] int64`, or 0."""
    differ: npt.NDArray[np.bool_] = words[:, RECORD_KV_HASH] != (0 if hashes is None else hashes)
    for word in set(range(WORDS)) - {RECORD_KV_HASH}:
        differ |= words[:, word] != base[:, word]
    return differ


def _nonzero(name: str, array: npt.NDArray[Any]) -> Rows:
    words = array.reshape(len(array), -1)
    if array.dtype == np.uint8 and array.flags.c_contiguous and words.shape[1] % 8 == 0:
        words = words.view(np.int64)
    found: npt.NDArray[np.bool_] = np.zeros(len(array), np.bool_)
    for column in range(words.shape[1]):  # which numpy does many times faster than row by row
        found |= words[:, column] != 0
    return _chosen(name, array, found)


def _chosen(name: str, array: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> Rows:
    edges = np.flatnonzero(np.diff(mask.view(np.int8), prepend=0, append=0))
    return Rows(name, array, edges[::2], edges[1::2] - edges[::2])


PART_BYTES: Final = 4 << 20
# Requests that nothing names any more are in at most this many keyframe events more, the last of them.
REQUESTS_KEPT: Final = 4096


def keyframe_events(recorded: RecordedState, *, time_ns: int) -> Iterator[TraceEvent]:
    """Yield the keyframe of the state; no event may be applied before the last event was taken."""
    state, activity, history = recorded.state, recorded.state.activity, recorded.history
    labels = KeyframeLabels(
        truth_fill=-1 if recorded.use.truth_fill else 0,
        ran=activity.ran,
        decoded=activity.decoded,
        since_sweep=activity.since_sweep,
        any_unknown=[pool.any_unknown for pool in state.pools],
        last_forward=history.last_forward,
        had_gap=history.had_gap,
        from_start=history.ledger.from_start,
    )
    yield _event(KEYFRAME_BEGIN, time_ns, labels=msgspec.json.encode(labels).decode())
    for request_id, facts in state.request_table.facts.items():
        named: dict[str, int | str] = {"name": facts.name, "prompt_len": facts.prompt_len, "room": facts.room}
        for identity in facts.identities or (None,):
            event = _event(KEYFRAME_REQUEST, time_ns, request_id=request_id, **named)
            if identity is not None:
                event.ints = dict(zip(IDENTITY_COLUMNS, identity.values.T.copy(), strict=True))
                event.ints["state_start"] = np.array([identity.event], np.int64)
            yield event
    for rows in rows_in_use(recorded):
        yield from _parts(rows, time_ns)
    for fed in history.samples.waiting():
        yield _waiting(fed, time_ns)
    yield _event(KEYFRAME_END, time_ns)


def forget_old_requests(recorded: RecordedState) -> None:
    """Drop the names of requests that no array names, but for the last ones named, and of those that are gone."""
    state, history = recorded.state, recorded.history
    columns = [tier.writers[:, 2] for pool in state.pools for tier in (pool.pool, pool.host)]
    columns += [rows[:, column] for rows in history.ledger.rows for column in (OWNER, JOINER)]
    columns += [rows[:, ROW_REQUEST] for rows in history.rows.last]
    columns.append(history.rows.status[:, STATUS_REQUEST])
    keep = set(list(history.ended)[-REQUESTS_KEPT:]) | set(history.ledger.held_by)
    history.ended = {request: event for request, event in history.ended.items() if request in keep}
    facts = state.request_table.facts
    known = set(list(facts)[-REQUESTS_KEPT:]).union(history.ended, *(np.unique(column).tolist() for column in columns))
    state.request_table.facts = {request: found for request, found in facts.items() if request in known}


def _parts(rows: Rows, time_ns: int) -> Iterator[TraceEvent]:
    """Yield an array's rows in parts of about `PART_BYTES`; whole arrays at a time, for a pool in use has many runs."""
    row_bytes = rows.array.itemsize * (rows.array.shape[1] if rows.array.ndim == 2 else 1)
    most = max(1, PART_BYTES // row_bytes)
    ends = np.cumsum(rows.counts)
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, most):
        end = min(begin + most, total)
        first, last = np.searchsorted(ends, (begin, end - 1), side="right").tolist()
        starts, counts = rows.starts[first : last + 1].copy(), rows.counts[first : last + 1].copy()
        before = begin - (int(ends[first]) - int(counts[0]))  # of the first run, in the part before
        starts[0] += before
        counts[0] -= before
        counts[-1] -= int(ends[last]) - end
        event = _event(KEYFRAME_PART, time_ns, note=rows.name)
        event.ints = {"state_start": starts, "state_count": counts}
        # A copy: the state moves on while the part waits to be written.
        chosen = np.ascontiguousarray(rows.array[runs_to_slots(starts, counts)])
        event.bytes = {"state_bytes": chosen.view(np.uint8).reshape(-1)}
        yield event


def _waiting(fed: FedForward, time_ns: int) -> TraceEvent:
    """Return a forward that a sample event may yet speak of, with its number among the events and its time."""
    forward = fed.forward
    event = _event(KEYFRAME_FORWARD, time_ns, forward=forward.forward, mode=forward.mode, note="told" * fed.told)
    event.ints = {name: values for name in FED_COLUMNS if len(values := getattr(forward, name))}
    if forward.out_cache_loc and len(forward.out_cache_loc[0]):
        event.ints["out_cache_loc"] = forward.out_cache_loc[0]
    event.ints["state_start"] = np.array([forward.event, forward.time_ns], np.int64)
    return event


def _event(status: str, time_ns: int, **scalars: int | str) -> TraceEvent:
    return TraceEvent(kind="keyframe", time_ns=time_ns, scalars={"status": status, **scalars})
