"""The trace and the report that `triage.py` asks: requests prefilled in chunks and decoded in batches, damage from half way."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

CHUNK, BATCH, PAGE = 2048, 256, 16
PREFILL_SHARE = 0.7


def make_data(folder: Path, num_tokens: int, num_violations: int) -> None:
    """Write trace.arrow, and trace.report with as many violations."""
    from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
    from kvcanary.recorder.writing.writer import TraceWriter

    num_slots = max(1 << 16, 1 << (num_tokens // 100).bit_length())
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=num_slots, page_size=PAGE),),
        tables=(StateTable(rows=BATCH + 1, width=1 << 15),),
    )
    random = np.random.default_rng(0)
    with TraceWriter(folder / "trace.arrow", header, overwrite=True, max_queued_bytes=2 << 30) as writer:
        forward = write_forwards(writer, random, num_tokens, num_slots)
        if not writer.flush(timeout=600):
            raise SystemExit("the disk is too slow for the trace")
    if writer.stats().dropped_events:
        raise SystemExit(f"{writer.stats().dropped_events} events were dropped: the disk is too slow")
    write_report(folder, random, num_violations, forward, num_slots)


def add_incidents(folder: Path) -> None:
    """Find the incidents of the report, as a replay does, where it has none."""
    from kvcanary.analysis.incidents.finding import find_incidents, incidents_fit, write_incidents

    report = folder / "trace.report"
    if not incidents_fit(report):
        write_incidents(report, find_incidents(report, [folder / "trace.arrow"]))


def write_forwards(writer: Any, random: Any, num_tokens: int, num_slots: int) -> int:
    """Write requests that are prefilled in chunks and then decoded together; returns the number of forwards."""
    from kvcanary.recorder.trace.event import TraceEvent

    def append(kind: str, scalars: dict[str, Any], ints: dict[str, Any] | None = None) -> None:
        while writer.stats().queued_bytes > 1 << 30:
            time.sleep(0.01)
        writer.append(TraceEvent(kind=kind, time_ns=next(clock), scalars=scalars, ints=ints or {}))

    written = forward = slot = request = 0
    clock = iter(range(1_700_000_000_000_000_000, 1 << 62, 1_000_000))
    chunks_a_request = 4
    while written < num_tokens:
        ids = np.arange(request, request + BATCH)
        request += BATCH
        prompt = CHUNK * chunks_a_request
        room = int(BATCH * prompt + (1 - PREFILL_SHARE) / PREFILL_SHARE * BATCH * prompt)
        prompts = BATCH if written + room <= num_tokens else max(1, (num_tokens - written) // prompt)
        for number, request_id in enumerate(ids[:prompts]):
            append("request", {"request_id": int(request_id), "name": f"r{request_id}", "prompt_len": prompt})
            for chunk in range(chunks_a_request):
                slots = (slot + np.arange(CHUNK)) % (num_slots - PAGE) + PAGE
                slot += CHUNK
                ints = {
                    "req_pool_indices": np.array([number + 1]),
                    "request_ids": np.array([request_id]),
                    "prefix_lens": np.array([chunk * CHUNK]),
                    "extend_lens": np.array([CHUNK]),
                    "input_ids": random.integers(0, 50_000, CHUNK),
                    "positions": np.arange(chunk * CHUNK, (chunk + 1) * CHUNK),
                    "out_cache_loc": slots,
                }
                append("forward", {"forward": forward, "mode": "extend"}, ints)
                forward += 1
        written += prompts * prompt
        for step in range(int(prompt * (1 - PREFILL_SHARE) / PREFILL_SHARE)):
            if written >= num_tokens:
                break
            slots = (slot + np.arange(prompts)) % (num_slots - PAGE) + PAGE
            slot += prompts
            ints = {
                "req_pool_indices": np.arange(1, prompts + 1),
                "request_ids": ids[:prompts],
                "prefix_lens": np.full(prompts, prompt + step),
                "extend_lens": np.ones(prompts, dtype=np.int64),
                "input_ids": random.integers(0, 50_000, prompts),
                "positions": np.full(prompts, prompt + step),
                "out_cache_loc": slots,
            }
            append("forward", {"forward": forward, "mode": "decode"}, ints)
            forward += 1
            written += prompts
    return forward


def write_report(folder: Path, random: Any, count: int, num_forwards: int, num_slots: int) -> None:
    """Write violations that begin half way: a few dozen requests, some thousand slots, again and again."""
    from kvcanary.recorder.trace.reader import TraceReader
    from kvcanary.replayer.report.findings import FINDING_SCHEMA
    from kvcanary.replayer.report.violations import VIOLATION_SCHEMA, TableSink

    report = folder / "trace.report"
    report.mkdir(exist_ok=True)
    TableSink(report / "findings.parquet", FINDING_SCHEMA).close()
    with closing(TableSink(report / "violations.parquet", VIOLATION_SCHEMA)) as sink:
        for start in range(0, count, 1 << 16):
            n = min(1 << 16, count - start)
            forwards = num_forwards // 2 + (np.arange(start, start + n) * (num_forwards // 2) // count)
            slots = PAGE + random.integers(0, min(num_slots - PAGE, 4096), n)
            requests = random.integers(0, 48, n)
            columns = {name: np.zeros(n, dtype=np.int64) for name in VIOLATION_SCHEMA.names}
            columns |= {
                "slot": slots,
                "position": slots,
                "expected_position": slots,
                "stored_token": random.integers(0, 50_000, n),
                "expected_token": random.integers(0, 50_000, n),
                "event": forwards + 256,
                "forward": forwards,
                "first_forward": forwards,
                "last_forward": forwards,
                "num_forwards": np.ones(n, dtype=np.int64),
                "request_id": requests,
                "writer_forward": slots % max(num_forwards // 2, 1),
                "writer_event": slots,
                "writer_request_id": slots % 48,
            }
            texts = {
                "launch": "HEAD_K_FULL",
                "reasons": "VERIFY_TOKEN",
                "oracle": "truth",
                "mode": "decode",
                "endpoint": "HEAD",
                "half": "K",
                "request": "r",
                "writer_request": "r",
            }
            arrays = [
                pa.array([texts[field.name]] * n, pa.utf8()).cast(field.type)
                if field.name in texts
                else pa.array(columns[field.name]).cast(field.type)
                for field in VIOLATION_SCHEMA
            ]
            sink.append(pa.table(arrays, schema=VIOLATION_SCHEMA))
    with TraceReader(folder / "trace.arrow") as reader:
        trace_id = reader.header.trace_id
    summary = {"trace": str((folder / "trace.arrow").absolute()), "trace_id": trace_id, "verdict": "corrupt"}
    (report / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
