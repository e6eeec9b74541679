"""Trees of drafts: what is recorded of forwards over tokens that share positions.

A trace's forward is a chain of tokens for each request. Of a tree it is recorded which slots are filled; what lies there is unknown
from then on, the accepted branch too.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.device.recorder import DeviceRecorder
from ...capture.host_arrays import own_int64
from ...capture.recorder import Recorder
from .connectors.unknown import record_unknown
from .history import GroupHistory
from .layout import RunnerLayout, SglangLayout, own_slots

_NOTE: Final = "a tree of drafts"


def draft_tree(server_args: Any) -> str:
    """Say why what an engine drafts is a tree, whose tokens share positions; "" for chains, and for no drafts.

    N-grams are filled up to their number with tokens right behind the root, so that several share a position there even if nothing
    branches (`fillResult` in SGLang's `ngram_corpus/result.cpp`).
    """
    algorithm = getattr(server_args, "speculative_algorithm", None)
    branches = "speculative_ngram_max_bfs_breadth" if algorithm == "NGRAM" else "speculative_eagle_topk"
    most = int(getattr(server_args, branches, None) or 1) if algorithm else 1
    if most > 1:
        return f"drafts are trees: {branches} is {most}, expected 1"
    tokens = int(getattr(server_args, "speculative_num_draft_tokens", None) or 0)
    if algorithm == "NGRAM" and tokens != 2:  # the root, and one behind it
        return f"drafts are trees: n-grams that are shorter than speculative_num_draft_tokens, {tokens}, are filled up"
    return ""


def record_filled(
    recorder: Recorder | DeviceRecorder,
    layout: SglangLayout,
    histories: Sequence[GroupHistory],
    runner: RunnerLayout,
    written: Any,
) -> None:
    """Record that a forward of a runner fills the slots `written`, `[T]` of its table, None for none; nothing waits for them."""
    for number in runner.groups.values() if written is not None else ():
        own = [history for history in histories if number in history.groups]
        fill = functools.partial(_fill, recorder, number, own)
        if not isinstance(recorder, DeviceRecorder):
            fill(own_slots(layout, number, own_int64(written)))
            continue
        lut, slots = layout.groups[number].lut, written
        if lut >= 0:
            table = layout.luts[lut]
            slots = table[written.clamp(0, table.numel() - 1)]
        recorder.with_next_forward(fill, slots)
        recorder.forget_slots(number, slots)


def _fill(
    recorder: Recorder | DeviceRecorder, number: int, histories: Sequence[GroupHistory], slots: Int64Array
) -> None:
    """Record that nobody knows what is in slots of a group from now on."""
    own = recorder.recorder if isinstance(recorder, DeviceRecorder) else recorder
    slots = np.unique(slots[(slots > 0) & (slots < recorder.header.groups[number].num_slots)])
    for history in histories:
        history.given_out(slots, _NOTE)
    record_unknown(own, number, slots, _NOTE)
