"""Two hand-driven engines and a wire between them, each with a real `Recorder`: what a test of transfers needs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput, TruthTokens
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, Oracle, PoolGroup, StateTable, TraceHeader

BYTES = 16
SLOTS = 64
WIDTH = 32


@dataclass
class Side:
    """An engine with one pool of K and V, driven by hand."""

    path: Path
    role: str = ""
    oracle: int = 0
    sweep_interval: int = 0
    request: int = 7
    room: int = -1
    prompt_len: int = -1

    def __post_init__(self):
        streams = tuple(KvStream(half=h, bytes_per_token=BYTES, capture_bytes=BYTES) for h in "KV")
        self.header = TraceHeader(
            groups=(PoolGroup(name="full", num_slots=SLOTS, streams=streams),),
            tables=(StateTable(rows=4, width=WIDTH),),
            truth_table=StateTable(name="truth", rows=4, width=WIDTH),
            role=self.role,
            oracle=Oracle(vocab_size=self.oracle) if self.oracle else None,
            sweep_interval=self.sweep_interval,
        )
        self.kv = [np.zeros((SLOTS, BYTES), np.uint8) for _ in "KV"]
        sources = {
            (0, n): KvSource(tensor=data, page_size=1, bytes_per_token=BYTES, read_bytes=BYTES)
            for n, data in enumerate(self.kv)
        }
        self.table = np.zeros((4, WIDTH), np.int32)
        self.recorder = Recorder(self.path, self.header, kv_sources=sources)
        self.recorder.request(
            request_id=self.request, name=f"r{self.request}", room=self.room, prompt_len=self.prompt_len
        )

    def forward(self, tokens, slots, *, start=0, mode="extend", truth=None, sampled=(), row=1):
        """Feed `tokens` at positions `start ...` into `slots`."""
        known = np.array(truth if truth is not None else tokens, np.int64)
        self.recorder.before_forward(
            ForwardInput(
                mode=mode,
                req_pool_indices=[row],
                request_ids=[self.request],
                prefix_lens=[start],
                extend_lens=[len(tokens)],
                input_ids=tokens,
                positions=np.arange(start, start + len(tokens)),
                out_cache_loc=(np.array(slots),),
                reads=(self.table,),
                truth=TruthTokens(flat=known, lens=[len(known)]) if truth is not None else None,
            )
        )
        self.table[row, start : start + len(tokens)] = slots
        for half, data in enumerate(self.kv):
            for token, slot in zip(tokens, slots, strict=True):
                data[slot] = (np.arange(BYTES) * (half + 3) + token * 7 + slot) % 251
        self.recorder.after_forward(sampled_tokens=sampled, sampled_lens=[len(sampled)] if len(sampled) else ())

    def transfer(self, status, direction, slots, **more):
        self.recorder.transfer(
            status, direction=direction, room=5, group=0, slots=slots, request_id=self.request, row=1, **more
        )

    def close(self):
        self.recorder.close()
        assert self.recorder.stats().off == "closed", self.recorder.stats().off
        return self.path


def carry(source: Side, src, target: Side, dst):
    """Move bytes over the wire."""
    for mine, theirs in zip(source.kv, target.kv, strict=True):
        theirs[dst] = mine[src]
