"""A request in a sliding-window pool that is a ring."""

from pathlib import Path
from typing import Any

import numpy as np
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput, TableRead
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.run.replay import ReplaySettings, replay

WINDOW, RING, WIDTH = 4, 5, 64


class Ring:
    """One request in a ring of 5 slots, of which a forward reads the last 4 before it writes; slots 1 to 5."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pool = np.zeros((RING + 1, 16), np.uint8)
        stream = KvStream(half="K", bytes_per_token=16, capture_bytes=16)
        group = PoolGroup(
            name="ring",
            kind="swa",
            window=WINDOW,
            num_slots=RING + 1,
            streams=(stream,),
            halves=("K",),
            reads_before_write=True,
        )
        source = KvSource(tensor=self.pool, page_size=1, bytes_per_token=16, read_bytes=16)
        header = TraceHeader(groups=(group,), tables=(StateTable(rows=2, width=WIDTH),))
        self.recorder = Recorder(path, header, kv_sources={(0, 0): source})
        self.prefix = 0
        self.first_stored = 0  # what lies before it is in no slot

    def forward(self, extend: int, *, shift: int = 0) -> None:
        """A chunk of so many tokens, of which the last 5 are stored; the read begins `shift` positions too late."""
        prefix, end = self.prefix, self.prefix + extend
        positions = np.arange(prefix, end)
        slots = np.where(positions < end - RING, -1, 1 + positions % RING)
        first = max(0, prefix - WINDOW - 1 + shift)
        read = [1 + p % RING if p >= self.first_stored else -1 for p in range(first, prefix)]
        self.recorder.before_forward(
            ForwardInput(
                mode="extend" if extend > 1 else "decode",
                req_pool_indices=[1],
                request_ids=[7],
                prefix_lens=[prefix],
                extend_lens=[extend],
                input_ids=positions + 50,
                positions=positions,
                out_cache_loc=(slots,),
                reads=(TableRead(starts=[first], counts=[len(read)], slots=read),),
            )
        )
        for position, slot in zip(positions.tolist(), slots.tolist(), strict=True):
            if slot > 0:
                self.pool[slot] = position + 1
        self.recorder.after_forward()
        self.prefix, self.first_stored = end, max(self.first_stored, end - RING)

    def judged(self, **settings: Any) -> Any:
        self.recorder.close()
        return replay(self.path, settings=ReplaySettings(**settings), report=None)
