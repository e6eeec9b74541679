"""Forwards that no engine would run: rows repeat and pad in the middle, slots repeat across requests, tables hold slot 0 and
negative slots, every pool kind stands in one header, and slots are copied between tiers.
"""

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import KvStream, PoolGroup, Runner, StateTable, TraceHeader

ROWS, WIDTH, SLOTS, HOST = 5, 14, 24, 9


def streams(half: str, count: int, capture: int) -> tuple[KvStream, ...]:
    return tuple(KvStream(half=half, layer=n, bytes_per_token=capture, capture_bytes=capture) for n in range(count))


HEADER = TraceHeader(
    groups=(
        PoolGroup(
            name="full", num_slots=SLOTS, host_num_slots=HOST, streams=streams("K", 2, 32) + streams("V", 1, 16)
        ),
        PoolGroup(name="swa", kind="swa", window=3, lut=0, num_slots=SLOTS, streams=streams("V", 1, 16)),
        PoolGroup(name="other swa", kind="swa", window=5, lut=1, num_slots=SLOTS, halves=("V",)),
        PoolGroup(
            name="ring", kind="swa", window=4, table=1, num_slots=SLOTS, halves=("K",), reads_before_write=True,
            streams=streams("K", 3, 16),
        ),
        PoolGroup(name="draft", runner=1, num_slots=SLOTS, halves=("K",), streams=streams("K", 1, 48)),
    ),
    tables=(StateTable(rows=ROWS, width=WIDTH), StateTable(name="ring", rows=ROWS, width=WIDTH)),
    lut_lens=(SLOTS, SLOTS),
    truth_table=StateTable(name="truth", rows=ROWS, width=WIDTH),
    runners=(Runner(), Runner(name="draft", token_offset=1)),
)  # fmt: skip


def column(rng: np.random.Generator, low: int, high: int, count: int) -> np.ndarray:
    return rng.integers(low, high, count)


def forward(rng: np.random.Generator, number: int) -> TraceEvent:
    bs, runner = int(rng.integers(0, 6)), int(rng.random() < 0.25)
    rows, prefix = column(rng, 0, ROWS, bs), column(rng, 0, WIDTH, bs)
    extend = np.minimum(column(rng, 0, 4, bs), WIDTH - prefix)
    real = np.where(rows == 0, 0, extend)
    tokens = int(real.sum()) + int(rng.integers(0, 3))  # padding tokens stand behind
    positions = np.zeros(tokens, np.int64)
    positions[: real.sum()] = np.concatenate([np.arange(p, p + n) for p, n in zip(prefix, real, strict=True)] or [[]])
    wrong = rng.random(tokens) < 0.1
    positions[wrong] = column(rng, -2, WIDTH, int(wrong.sum()))
    slots = np.where(rng.random(2 * tokens) < 0.1, column(rng, -2, 1, 2 * tokens), column(rng, 1, SLOTS, 2 * tokens))
    runs = int(rng.integers(0, 3))
    starts = column(rng, 0, WIDTH - 3, runs)
    counts = column(rng, 0, 4, runs)
    luts, truths = int(rng.integers(0, 4)), int(rng.integers(0, 5))
    sampled = column(rng, 0, 2, bs)
    with_truth = rng.random() < 0.8
    widths = [x.capture_bytes for _, x in HEADER.streams(runner)]
    change = column(rng, 0, len(widths), int(rng.integers(0, 4)))
    alphabet = 2  # few values, so that a changed slot is now and then what it was
    return TraceEvent(
        kind="forward",
        time_ns=number,
        scalars={"forward": number, "runner": runner, "mode": "mixed"},
        ints={
            "req_pool_indices": rows,
            "request_ids": column(rng, 0, 1 << 40, bs),
            "prefix_lens": prefix,
            "extend_lens": extend,
            "truth_lens": column(rng, 0, WIDTH + 1, bs if with_truth else 0),
            "sampled_lens": np.where(rows == 0, 0, sampled),
            "sampled_tokens": column(rng, 0, 3, int(sampled[rows != 0].sum())),
            "input_ids": column(rng, 0, 3, tokens),
            "positions": positions,
            "out_cache_loc": slots,
            "table_index": column(rng, 0, 2, runs),
            "table_row": column(rng, 0, ROWS, runs),
            "table_start": starts,
            "table_count": counts,
            "table_slots": column(rng, -2, SLOTS, int(counts.sum())),
            "lut_index": column(rng, 0, 2, luts),
            "lut_start": column(rng, 0, SLOTS, luts),
            "lut_count": np.ones(luts, np.int64),
            "lut_slots": column(rng, -1, SLOTS, luts),
            "truth_row": column(rng, 0, ROWS, truths),
            "truth_start": column(rng, 0, WIDTH, truths),
            "truth_count": np.ones(truths, np.int64),
            "truth_tokens": column(rng, 0, 3, truths),
            "kv_change_stream": change,
            "kv_change_slot": column(rng, 0, SLOTS, len(change)),
            "kv_change_phase": column(rng, 0, 2, len(change)),
        },
        bytes={
            "kv_bytes": np.repeat(column(rng, 0, alphabet, tokens * sum(widths) // 16), 16).astype(np.uint8),
            "kv_change_bytes": np.repeat(
                column(rng, 0, alphabet, sum(widths[c] for c in change) // 16), 16
            ).astype(np.uint8),
        },
    )  # fmt: skip


def kv_copy(rng: np.random.Generator) -> TraceEvent:
    tiers = column(rng, 0, 2, 2)
    count = int(rng.integers(0, 6))
    ends = [(SLOTS, HOST)[tier] - count + 1 for tier in tiers]
    values = {
        "group": 0, "src_tier": tiers[0], "dst_tier": tiers[1], "count": count,
        "src": rng.integers(0, ends[0]), "dst": rng.integers(0, ends[1]),
    }  # fmt: skip
    return TraceEvent(kind="kv_copy", ints={f"copy_{k}": np.array([v], np.int64) for k, v in values.items()})
