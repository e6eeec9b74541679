"""A keyframe: all that a replay would hold at one point of a recording, as events of bounded size.

It begins with an event that says what is not an array, continues with the requests that are still named and with the
rows in use of every array, and ends with an event that says that it is whole.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array, record_words
from ...kernels.constants import RECORD_KV_HASH, KvHashMode
from ..capture.host_arrays import runs_to_slots
from ..trace.event import TraceEvent
from ..trace.schema import KEYFRAME_BEGIN, KEYFRAME_END, KEYFRAME_FORWARD, KEYFRAME_PART, KEYFRAME_REQUEST
from .apply import RecordedState
from .history import FED_COLUMNS, FedForward
from .pools import GroupPool, Tier
from .replay_state import ReplayState
from .tables import TableUse

WORDS = 4  # of a canary record, the KV hash the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a keyframe holds of one array: runs of its rows, and where to read them.

    `array` is seen as a line of rows, `starts`, `counts` `[n] int64` the runs.
    """

    name: str
    array: npt.NDArray[Any]
    starts: Int64Array
    counts: Int64Array


def rows_in_use(state: ReplayState, use: TableUse) -> Iterator[Rows]:
    """Yield what a keyframe holds of each array, in the order in which it must be put back."""
    tables = state.tables
    for number, (table, ends) in enumerate(zip(tables.req_to_token, use.ends, strict=True)):
        yield Rows(name=f"table.{number}", array=table.reshape(-1), **_runs(_used(ends, table.shape[1])))
    for number, lut in enumerate(tables.luts):
        yield _nonzero(f"lut.{number}", lut)
    if tables.truth is not None:
        runs = _runs(_used(use.truth_ends, tables.truth.shape[1]))
        yield Rows(name="truth", array=tables.truth.reshape(-1), **runs)
    for pool in state.pools:
        for tier, name in tiers(pool):
            yield from _tier_rows(pool, tier, name)
    history = state.history
    if history is None:
        return
    for number, (ledger, transfers) in enumerate(zip(history.ledger.rows, history.ledger.transfers, strict=True)):
        yield _nonzero(f"ledger.{number}", ledger)
        yield _nonzero(f"transfers.{number}", transfers)
    for number, last in enumerate(history.rows.last):
        yield _nonzero(f"rows.{number}", last)
    yield _nonzero("status", history.rows.status)
    yield _nonzero("samples", history.samples.last)
    ended = np.array(list(history.ended.items()), np.int64).reshape(-1, 2)
    for name, rows in (("ended", ended), ("dropped", history.dropped.rows())):
        yield Rows(name=name, array=rows, **_runs((np.zeros(1, np.int64), np.array([len(rows)]))))


def tiers(pool: GroupPool) -> list[tuple[Tier, str]]:
    """Return the tiers that have slots, with how their arrays' names begin."""
    named = [(pool.pool, f"pool.{pool.index}"), (pool.host, f"host.{pool.index}")]
    return [(tier, name) for tier, name in named if len(tier.writers)]


def _tier_rows(pool: GroupPool, tier: Tier, name: str) -> Iterator[Rows]:
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
    for number, data in enumerate(tier.kv):
        yield _nonzero(f"{name}.kv.{number}", data)
    yield _nonzero(f"{name}.writers", tier.writers)
    yield _nonzero(f"{name}.unknown", tier.unknown)


def places(state: ReplayState, kv_hash_mode: KvHashMode) -> dict[str, npt.NDArray[Any]]:
    """Return where each array of a keyframe goes, but for those of `pool.G` and `host.G` records, `ended` and `dropped`."""
    found: dict[str, npt.NDArray[Any]] = {}
    tables = state.tables
    found |= {f"table.{number}": table.reshape(-1) for number, table in enumerate(tables.req_to_token)}
    found |= {f"lut.{number}": lut for number, lut in enumerate(tables.luts)}
    if tables.truth is not None:
        found["truth"] = tables.truth.reshape(-1)
    for pool in state.pools:
        for tier, name in tiers(pool):
            for half, records in tier.tail.items():
                found[f"{name}.hashes.{half}"] = record_words(records, written=True)[:, RECORD_KV_HASH]
                found[f"{name}.tail.{half}"] = record_words(records, written=True)
                if kv_hash_mode is KvHashMode.ALL:  # comes behind the other one, and takes its place
                    found[f"{name}.whole_hashes.{half}"] = found[f"{name}.hashes.{half}"]
                elif tier.whole_hashes:
                    found[f"{name}.whole_hashes.{half}"] = tier.whole_hashes[half]
            found |= {f"{name}.head.{half}": record_words(r, written=True) for half, r in tier.head.items()}
            found |= {f"{name}.kv.{number}": data for number, data in enumerate(tier.kv)}
            found[f"{name}.writers"] = tier.writers
            found[f"{name}.unknown"] = tier.unknown
    history = state.history
    if history is not None:
        found |= {f"ledger.{number}": rows for number, rows in enumerate(history.ledger.rows)}
        found |= {f"transfers.{number}": started for number, started in enumerate(history.ledger.transfers)}
        found |= {f"rows.{number}": last for number, last in enumerate(history.rows.last)}
        found["status"] = history.rows.status
        found["samples"] = history.samples.last
    return found


def _differ(words: Int64Array, base: Int64Array, hashes: Int64Array | None) -> npt.NDArray[np.bool_]:
    """Say which records are not the base's with KV hash `hashes`, `[n] int64`, or 0."""
    differ: npt.NDArray[np.bool_] = words[:, 0] != base[:, 0]
    for word in range(1, WORDS - 1):
        differ |= words[:, word] != base[:, word]
    if hashes is None:
        differ |= words[:, RECORD_KV_HASH] != 0
    return differ


def _nonzero(name: str, array: npt.NDArray[Any]) -> Rows:
    return _chosen(name, array, _any(array))


def _any(array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say which rows are not all zero; column by column, which numpy does many times faster than row by row."""
    if array.ndim == 1:
        return array != 0
    words = array
    if array.dtype == np.uint8 and array.flags.c_contiguous and array.shape[1] % 8 == 0:
        words = array.view(np.int64)
    found: npt.NDArray[np.bool_] = np.zeros(len(array), np.bool_)
    for column in range(words.shape[1]):
        found |= words[:, column] != 0
    return found


def _chosen(name: str, array: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> Rows:
    edges = np.flatnonzero(np.diff(mask.view(np.int8), prepend=0, append=0))
    return Rows(name=name, array=array, starts=edges[::2], counts=edges[1::2] - edges[::2])


def _used(ends: Int64Array, width: int) -> tuple[Int64Array, Int64Array]:
    """Return the filled entries as runs `(starts, counts)` of a table seen as one line, `[n] int64` each."""
    rows = np.flatnonzero(ends)
    return rows * width, ends[rows]


def _runs(found: tuple[Int64Array, Int64Array]) -> dict[str, Int64Array]:
    return {"starts": found[0], "counts": found[1]}


PART_BYTES: Final = 4 << 20
# Requests that nothing names any more are in at most this many keyframe events more, the last of them.
REQUESTS_KEPT: Final = 4096


def keyframe_events(recorded: RecordedState, *, time_ns: int) -> Iterator[TraceEvent]:
    """Yield the keyframe of the state; no event may be applied before the last event was taken."""
    state, use = recorded.state, recorded.use
    yield _event(KEYFRAME_BEGIN, time_ns, labels=json.dumps(_scalars(state, use), separators=(",", ":")))
    for request_id, facts in state.request_table.facts.items():
        yield _event(
            KEYFRAME_REQUEST,
            time_ns,
            request_id=request_id,
            name=facts.name,
            prompt_len=facts.prompt_len,
            room=facts.room,
        )
    for rows in rows_in_use(state, use):
        yield from _parts(rows, time_ns)
    if state.history is not None:
        for fed in state.history.samples.waiting():
            yield _waiting(fed, time_ns)
    yield _event(KEYFRAME_END, time_ns)


def forget_old_requests(state: ReplayState) -> None:
    """Drop the names of requests that no array names, but for the last ones named, and of those that are gone."""
    spoken_of: set[int] = set()
    for pool in state.pools:
        for tier in (pool.pool, pool.host):
            spoken_of.update(np.unique(tier.writers[:, 2]).tolist())
    history = state.history
    if history is not None:
        for ledger in history.ledger.rows:
            for column in (1, 7):  # owner, joiner
                spoken_of.update(np.unique(ledger[:, column]).tolist())
        for rows in history.rows.last:
            spoken_of.update(np.unique(rows[:, 1]).tolist())
        spoken_of.update(np.unique(history.rows.status[:, 1]).tolist())
        keep = set(list(history.ended)[-REQUESTS_KEPT:]) | set(history.ledger.held_by)
        history.ended = {request: event for request, event in history.ended.items() if request in keep}
        ended = history.ended
    else:
        ended = {}
    facts = state.request_table.facts
    last = set(list(facts)[-REQUESTS_KEPT:])
    state.request_table.facts = {i: f for i, f in facts.items() if i in spoken_of or i in last or i in ended}


def _scalars(state: ReplayState, use: TableUse) -> dict[str, Any]:
    """Return what is not an array."""
    activity, history = state.activity, state.history
    found: dict[str, Any] = {
        "truth_fill": use.truth_fill,
        "ran": activity.ran,
        "decoded": activity.decoded,
        "since_sweep": activity.since_sweep,
        "any_unknown": [pool.any_unknown for pool in state.pools],
    }
    if history is not None:
        found |= {
            "last_forward": history.last_forward,
            "had_gap": history.had_gap,
            "from_start": history.ledger.from_start,
        }
    return found


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


__all__ = ["forget_old_requests", "keyframe_events"]
