"""The transformers adapter on a GPU: `pytest tests/device`, on a machine that has one; not part of `make test`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput, TruthTokens
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.tiny_models import generate, model

MODELS = ("llama", "gemma3_hybrid", "mistral_sliding")


def judged(path: Path) -> Any:
    return replay(path, settings=ReplaySettings(), report=None)


def on_gpu(name: str) -> Any:
    return model(name).to("cuda")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_identical_and_the_trace_is_clean(tmp_path: Path, name: str, graphs: bool, overlaps: bool) -> None:
    subject = on_gpu(name)
    options = {"max_new_tokens": 60, "use_cuda_graph": graphs, "use_async_batching": overlaps}
    expected = generate(subject, **options)
    assert generate(subject, **options) == expected, "the engine does not repeat itself; the comparison means nothing"
    with attach(tmp_path / "trace.arrow") as attachment:
        assert generate(subject, **options) == expected
    assert attachment.recorder.stats().off == "closed"
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.violations, summary.findings, summary.gaps, summary.losses) == (0, 0, [], []), (
        summary.first_violation
    )
    assert summary.complete
    assert summary.forwards_watched == summary.forwards > 60
    print(
        f"{name} graphs={graphs} overlaps={overlaps}: {summary.forwards} forwards, {summary.verified} verified, clean"
    )


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_byte_flipped_on_the_device_is_found(tmp_path: Path, overlaps: bool) -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    subject = on_gpu("llama")
    with attach(tmp_path / "trace.arrow") as attachment:
        recorded = ContinuousBatchProcessor._generation_step
        steps = []

        def step(self: Any, engine_model: Any) -> Any:
            if len(steps) == 20:
                allocator = next(iter(self.cache.cache_allocators.values()))
                name, table = next(iter(allocator.block_table.items()))
                row = table[0] * allocator.block_physical_stride + 3
                k_rows, _ = allocator._kv_token_views[0]
                k_rows.view(torch.uint8)[row].view(-1)[5] ^= 0xFF
                steps.append((name, table[0] * allocator.tokens_per_page + 3))
            else:
                steps.append(None)
            return recorded(self, engine_model)

        ContinuousBatchProcessor._generation_step = step
        try:
            generate(subject, max_new_tokens=40, use_async_batching=overlaps)
        finally:
            ContinuousBatchProcessor._generation_step = recorded
    assert attachment.recorder.stats().off == "closed"
    summary = judged(tmp_path / "trace.arrow")
    name, slot = steps[20]
    first = summary.first_violation
    assert (first["forward"], first["slot"], first["request"]) == (20, slot, name)
    assert set(summary.violations_by_reason) == {"VERIFY_KV_HASH"}


def test_device_tensors_record_as_host_arrays_do(tmp_path: Path) -> None:
    """The same random forwards, once as CUDA tensors and once as numpy arrays, give the same events."""
    paths = {}
    for device in ("numpy", "cuda"):
        paths[device] = tmp_path / f"{device}.arrow"
        record_random_forwards(paths[device], device)
    one, other = (list(read_trace(path)) for path in paths.values())
    assert len(one) == len(other) > 30
    for a, b in zip(one, other, strict=True):
        for name in ("input_ids", "out_cache_loc", "table_slots", "table_start", "truth_tokens", "kv_change_slot"):
            assert a.ints(name).tolist() == b.ints(name).tolist(), name
        assert a.bytes("kv_bytes").tobytes() == b.bytes("kv_bytes").tobytes()
        assert a.bytes("kv_change_bytes").tobytes() == b.bytes("kv_change_bytes").tobytes()
    assert any(len(event.ints("kv_change_slot")) for event in one)


def record_random_forwards(path: Path, device: str) -> None:
    rng = np.random.default_rng(5)
    rows, width, num_slots, row_bytes = 5, 64, 256, 64
    table = np.zeros((rows, width), np.int32)
    kv = np.zeros((num_slots, row_bytes), np.uint8)
    there = (lambda a: a) if device == "numpy" else (lambda a: torch.from_numpy(np.ascontiguousarray(a)).to("cuda"))
    device_table, device_kv = there(table), there(kv)
    header = TraceHeader(
        groups=(
            PoolGroup(
                name="full",
                num_slots=num_slots,
                halves=("K",),
                streams=(KvStream(half="K", bytes_per_token=row_bytes, capture_bytes=32),),
            ),
        ),
        tables=(StateTable(rows=rows, width=width),),
        truth_table=StateTable(name="truth", rows=rows, width=width),
    )
    source = KvSource(tensor=device_kv, page_size=1, bytes_per_token=row_bytes, read_bytes=row_bytes)
    free = list(rng.permutation(np.arange(1, num_slots)))
    tokens = rng.integers(0, 500, (rows, width))
    done = np.zeros(rows, np.int64)
    with Recorder(path, header, kv_sources={(0, 0): source}) as recorder:
        for number in range(32):
            batch = np.flatnonzero(rng.random(rows - 1) < 0.7) + 1
            extend = np.ones(len(batch), np.int64)
            slots = np.array([free.pop() for _ in batch], np.int64)
            table[batch, done[batch]] = slots
            if number % 5 == 4 and done[1]:
                kv[table[1, 0], 7] ^= 0xFF
            if device == "cuda":
                device_table.copy_(torch.from_numpy(table))
                device_kv.copy_(torch.from_numpy(kv))
            recorder.before_forward(
                ForwardInput(
                    mode="decode",
                    req_pool_indices=there(batch.astype(np.int64)),
                    request_ids=batch + 100,
                    prefix_lens=there(done[batch]),
                    extend_lens=there(extend),
                    input_ids=there(tokens[batch, done[batch]]),
                    positions=there(done[batch]),
                    out_cache_loc=(there(slots),),
                    reads=(device_table,),
                    truth=TruthTokens(
                        flat=np.concatenate([tokens[r, : done[r] + 1] for r in batch] or [np.zeros(0, np.int64)]),
                        lens=done[batch] + 1,
                    ),
                )
            )
            kv[slots] = rng.integers(0, 256, (len(slots), row_bytes), dtype=np.uint8)
            if device == "cuda":
                device_kv.copy_(torch.from_numpy(kv))
            recorder.after_forward()
            done[batch] += 1
    assert recorder.stats().off == "closed"
