"""Has the small engine pass for one on a GPU: its steps are captured by the device's kernels, in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
from kvcanary.kernels.capture import model_forward
from kvcanary.recorder.engines.vllm import kv, recording
from kvcanary.recorder.process.settings import RecordingSettings

from . import fake_engine
from .fake_engine import DIM

COLUMNS = (
    *("req_pool_indices", "prefix_lens", "extend_lens", "input_ids", "positions", "out_cache_loc", "truth_lens"),
    *("attention_seq_lens", "attention_query_lens"),
)


def pass_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine store K and V as it gets them, and be captured on its device."""

    def plain(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        blocks, heads, tokens, _ = kv_cache.shape
        both = kv_cache.view(blocks, heads, 2 * tokens, DIM)
        held = slot_mapping >= 0
        block, offset = slot_mapping[held] // tokens, slot_mapping[held] % tokens
        both[block, :, offset] = key[held]
        both[block, :, tokens + offset] = value[held]

    monkeypatch.setattr(fake_engine.Attention, "do_kv_cache_update", plain)
    monkeypatch.setattr(fake_engine.GPUModelRunner, "own_tables", False)
    monkeypatch.setattr(kv, "stored_halves", lambda *_: dict.fromkeys("KV", kv.PLAIN))
    monkeypatch.setattr(recording, "on_gpu", lambda _: True)
    monkeypatch.setattr(
        RecordingSettings, "new_sampling_seed", lambda _: None
    )  # other layers are sampled on the CPU alone
    monkeypatch.setattr(model_forward, "PROGRAMS", 6)  # the interpreter runs one program after another
    monkeypatch.setattr(model_forward, "TILE", 16)


def table_cells(event: Any) -> Iterator[tuple[int, ...]]:
    """Yield table, row, position and slot of each table entry that an event changes."""
    slots = iter(event.ints("table_slots").tolist())
    runs = (event.ints(f"table_{name}").tolist() for name in ("index", "row", "start", "count"))
    for table, row, start, count in zip(*runs, strict=True):
        yield from ((table, row, start + i, next(slots)) for i in range(count))
