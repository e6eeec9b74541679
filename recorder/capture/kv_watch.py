"""A forward's KV: which bytes changed that nobody wrote, and what the shadows take over once its event is accepted."""

from collections.abc import Mapping

import numpy as np

from ..trace.schema import PHASE_AFTER, PHASE_BEFORE
from .forward_input import CopiedForward, KvChange
from .host_arrays import ByteArray
from .kv_shadow import GroupKvShadow

_NOTHING = np.empty(0, np.int64)


def of_runner(groups: list[GroupKvShadow], runner: int) -> list[tuple[int, GroupKvShadow]]:
    """Return the runner's groups with their numbers, in header order."""
    return [(number, kv) for number, kv in enumerate(groups) if kv.group.runner == runner]


def watch(forward: CopiedForward, groups: list[GroupKvShadow], phase: int) -> None:
    """Add to the forward what changed of the bytes that it reads.

    Ring groups are looked at before the forward, whose writes may land on what it reads, the others after it.
    """
    stream_base = 0
    for number, kv in of_runner(groups, forward.runner):
        if kv.group.reads_before_write == (phase == PHASE_BEFORE):
            # What was just written has just been gathered as well: it cannot differ.
            written = forward.written[number] if phase == PHASE_AFTER else _NOTHING
            for stream, slots, content in kv.changes(forward.watched[number], written):
                change = KvChange(stream=stream_base + stream, phase=phase, slots=slots, content=content)
                forward.kv_changes.append(change)
        stream_base += len(kv.sources)


def take_forward(forward: CopiedForward, groups: list[GroupKvShadow], gathered: Mapping[int, list[ByteArray]]) -> None:
    """Take over an accepted forward's bytes, in a replay's order: seen before it, written by it, seen after it.

    `gathered[group][stream]` is `[T, capture_bytes] uint8`.
    """
    _take_changes(forward, groups, PHASE_BEFORE)
    for number, kv in of_runner(groups, forward.runner):
        kv.take_written(forward.written[number], gathered[number])
    _take_changes(forward, groups, PHASE_AFTER)


def _take_changes(forward: CopiedForward, groups: list[GroupKvShadow], phase: int) -> None:
    streams = [(kv, stream) for _, kv in of_runner(groups, forward.runner) for stream in range(len(kv.sources))]
    for change in forward.kv_changes:
        if change.phase == phase:
            kv, stream = streams[change.stream]
            kv.take_change(stream, change.slots, change.content)
