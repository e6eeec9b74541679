"""A keyframe: all that a replay would hold at one point of a recording, as events of bounded size.

It begins with an event that says what is not an array, goes on with the requests that are still spoken of and with the
rows in use of every array, and ends with an event that says that it is whole.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..trace.event import TraceEvent
from ..trace.schema import KEYFRAME_BEGIN, KEYFRAME_END, KEYFRAME_FORWARD, KEYFRAME_PART, KEYFRAME_REQUEST
from ..trace.slot_runs import runs_to_slots
from .machine import Machine, MachineState
from .sample_book import FED_COLUMNS, FedForward
from .state_arrays import Rows, rows_in_use
from .table_use import TableUse

PART_BYTES: Final = 4 << 20
# Requests that nothing speaks of any more are told in this many keyframes more at most, the last of them.
REQUESTS_KEPT: Final = 4096

Int64Array = npt.NDArray[np.int64]


def keyframe_events(machine: Machine, *, time_ns: int) -> Iterator[TraceEvent]:
    """Yield the keyframe of a machine's state; the machine must not move on before the last event was taken."""
    state, use = machine.state, machine.use
    yield _event(KEYFRAME_BEGIN, time_ns, labels=json.dumps(_scalars(state, use), separators=(",", ":")))
    for request_id, facts in state.book.facts.items():
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


def forget_old_requests(state: MachineState) -> None:
    """Drop the names of requests that no array speaks of, but for the last ones told, and of those that are gone."""
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
    facts = state.book.facts
    last = set(list(facts)[-REQUESTS_KEPT:])
    state.book.facts = {i: f for i, f in facts.items() if i in spoken_of or i in last or i in ended}


def _scalars(state: MachineState, use: TableUse) -> dict[str, Any]:
    """Return what is not an array."""
    pulse, history = state.pulse, state.history
    found: dict[str, Any] = {
        "truth_fill": use.truth_fill,
        "ran": pulse.ran,
        "decoded": pulse.decoded,
        "since_sweep": pulse.since_sweep,
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
        # A copy: the machine moves on while the part waits to be written.
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
