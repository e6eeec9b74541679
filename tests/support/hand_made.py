"""A trace small enough to check by hand: two forwards' padding, a chunked prompt, two pool groups, a loss, a copy."""

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent, loss_event
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter

STREAM = KvStream(half="K", bytes_per_token=16, capture_bytes=16)
HEADER = TraceHeader(
    trace_id="hand-made",
    groups=(
        PoolGroup(name="full", num_slots=64, page_size=4, streams=(STREAM,)),
        PoolGroup(name="sliding", kind="swa", window=8, lut=0, num_slots=32, page_size=4),
    ),
    tables=(StateTable(rows=4, width=32),),
    lut_lens=(64,),
    slot_history="complete",
)


def event(kind, scalars=None, **ints):
    return TraceEvent(
        kind=kind,
        time_ns=1000,
        scalars=scalars or {},
        ints={name: np.array(values, dtype=np.int64) for name, values in ints.items()},
        bytes={"kv_bytes": np.zeros(16 * len(ints["input_ids"]), np.uint8)} if kind == "forward" else {},
    )


def runs(prefix, *values):
    """One run: the columns of a run in the schema's order."""
    names = {"slot": ("group", "start", "count"), "lut": ("index", "start", "count")}[prefix]
    return {f"{prefix}_{name}": [value] for name, value in zip(names, values, strict=True)}


EVENTS = [
    # 0: request 7 arrives; 1, 2: it gets row 1 and slots 4 to 11
    event("request", {"request_id": 7, "name": "o'neill", "prompt_len": 6}),
    event("status", {"request_id": 7, "status": "admitted"}, req_pool_indices=[1]),
    event("alloc", {"request_id": 7}, req_pool_indices=[1], **runs("slot", 0, 4, 8)),
    # 3: forward 0, the prompt's first chunk; full slots 4 to 7 lead to sliding slots 8 to 11
    event(
        "forward",
        {"forward": 0, "mode": "extend"},
        req_pool_indices=[1],
        request_ids=[7],
        prefix_lens=[0],
        extend_lens=[4],
        input_ids=[100, 101, 102, 103],
        positions=[0, 1, 2, 3],
        out_cache_loc=[4, 5, 6, 7],
        lut_slots=[8, 9, 10, 11],
        **runs("lut", 0, 4, 4),
    ),
    # 4: forward 1, the rest of it, with a padding row and two padding tokens; slot 9 has no sliding slot
    event(
        "forward",
        {"forward": 1, "mode": "mixed"},
        req_pool_indices=[0, 1],
        request_ids=[-1, 7],
        prefix_lens=[0, 4],
        extend_lens=[5, 2],
        input_ids=[104, 105, 0, 0],
        positions=[4, 6, 0, 0],
        out_cache_loc=[8, 9, 0, 0],
        sampled_lens=[0, 1],
        sampled_tokens=[106],
        sampled_logprobs=[1 << 32 | 0xBFC00000],  # raw, -1.5
        lut_slots=[12],
        **runs("lut", 0, 8, 1),
    ),
    # 5: slots 4 to 7 go to the cache; 6: request 9 joins them; 7: four events are lost
    event("alloc", {"request_id": 7, "status": "cached"}, **runs("slot", 0, 4, 4)),
    event("alloc", {"request_id": 9, "status": "shared"}, **runs("slot", 0, 4, 4)),
    loss_event(lost_events=4, note="queue full"),
    # 8, 9: request 7 leaves; 10: slot 4 is copied to slot 20 and on
    event("free", {"request_id": 7, "note": "finished"}, **runs("slot", 0, 8, 4)),
    event("status", {"request_id": 7, "status": "finished"}, req_pool_indices=[1]),
    event(
        "kv_copy",
        {"note": "fork"},
        copy_group=[0],
        copy_src_tier=[0],
        copy_src=[4],
        copy_dst_tier=[0],
        copy_dst=[20],
        copy_count=[2],
    ),
    # 11: request 9 decodes in row 2; position 5 of slot 9 was fed as 6 in event 4
    event(
        "forward",
        {"forward": 2, "mode": "decode"},
        req_pool_indices=[2],
        request_ids=[9],
        prefix_lens=[4],
        extend_lens=[1],
        input_ids=[200],
        positions=[4],
        out_cache_loc=[24],
        table_index=[0],
        table_row=[2],
        table_start=[0],
        table_count=[4],
        table_slots=[4, 5, 6, 7],
        kv_change_stream=[0],
        kv_change_slot=[5],
        kv_change_phase=[1],
    ),
    event("status", {"request_id": 9, "status": "aborted"}, req_pool_indices=[2]),
    event("evict", **runs("slot", 0, 4, 4)),
]
# The bytes of the one change, which `event` does not know of.
EVENTS[11].bytes["kv_change_bytes"] = np.zeros(16, np.uint8)


def write(path):
    with TraceWriter(path, HEADER) as writer:
        for item in EVENTS:
            writer.append(item)
    return path
