"""What transformers copies to the host and back, on the real engine: healthy is clean, and a hop that lies is named."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.recorder.capture.host_arrays import CopyEnds
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.engines.transformers.host_copies import HostCopies, Load, hash_blocks
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay
from transformers.generation.continuous_batching import continuous_api, offloading_manager

from ..support.engines.tiny_models import generate, model
from .hooked_engine import assert_clean, event_notes

MODELS = ("llama", "gemma3_hybrid", "mistral_sliding")
OFFLOADS = {
    "max_batch_tokens": 64,
    "safety_margin": 0.0,
    "max_new_tokens": 50,
    "cpu_offload_space": 0.01,
    "allow_block_sharing": False,
}
Manager = offloading_manager.OffloadingManager

pytestmark = [
    pytest.mark.usefixtures("engine_left_as_it_was", "nothing_pinned"),
    pytest.mark.one_in(2),
]  # make fuzz goes through all


@pytest.fixture
def nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA torch pins no memory; where the memory lies makes no difference here."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))


def run(name: str) -> Any:
    # A ring of 32 tokens is full soon, so where all layers slide the prompts must leave it room to grow.
    length = 10 if name == "mistral_sliding" else 30
    prompts = [list(range(10 + i, 10 + i + length)) for i in range(4)]
    return generate(model(name), prompts, num_blocks=14 if name == "llama" else 12, **OFFLOADS)


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_offload_is_clean_and_both_ends_are_looked_at(tmp_path: Path, name: str) -> None:
    expected = run(name)
    with attach(tmp_path / "trace.arrow"):
        assert run(name) == expected
    notes = event_notes(tmp_path / "trace.arrow")
    assert notes["kv_copy offload"] > 0
    assert notes["kv_copy load-back"] > 0
    assert notes["kv_copy landed late"] == 0
    given: set[int] = set()
    for event in read_trace(tmp_path / "trace.arrow"):
        if event.kind == "alloc":
            first, count = event.ints("slot_start"), event.ints("slot_count")
            given |= {slot for at, n in zip(first.tolist(), count.tolist(), strict=True) for slot in range(at, at + n)}
        if event.kind == "kv_copy":
            src, dst = event.ints("copy_src_hash"), event.ints("copy_dst_hash")
            assert src.all()
            assert np.array_equal(src, dst)
        if event.kind == "kv_copy" and event.scalar("note") == "load-back":
            assert set(event.ints("copy_dst").tolist()) <= given  # a load comes behind the allocation of its slots
    assert_clean(tmp_path / "trace.arrow")


def _other_page(restore: Callable[..., None], manager: Any, batch: Any) -> None:
    views = manager._cpu_views
    manager._cpu_views = {name: view.roll(1, 0) for name, view in views.items()}
    restore(manager, batch)
    manager._cpu_views = views


def _other_order(restore: Callable[..., None], manager: Any, batch: Any) -> None:
    views = manager._cpu_views
    manager._cpu_views = {name: view.roll(view.shape[1] // 2, 1) for name, view in views.items()}
    restore(manager, batch)
    manager._cpu_views = views


def _damaged(restore: Callable[..., None], manager: Any, batch: Any) -> None:
    restore(manager, batch)
    for tables in manager._request_id_to_cpu_blocks.values():  # of those that are yet to come back
        for name, blocks in tables.items():
            manager._cpu_views[name][blocks[:1]] ^= 1


@pytest.mark.parametrize(
    ("fault", "cause", "kind"),
    [
        (_other_page, "loaded_another", "load_of_other_prefix"),
        (_other_order, "other_order", "layout_misread"),
        (_damaged, "changed_in_store", "stored_wrong"),
    ],
)
def test_the_hop_that_lied_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], cause: str, kind: str
) -> None:
    restore = Manager.restore_scheduled_requests

    def faulty(manager: Any, batch: Any) -> None:
        if any(future.state.is_cpu_offloaded for future in batch):
            fault(restore, manager, batch)
        else:
            restore(manager, batch)

    monkeypatch.setattr(Manager, "restore_scheduled_requests", faulty)
    with attach(tmp_path / "trace.arrow"):
        run("llama")
    assert said(tmp_path, cause) == kind


@pytest.mark.parametrize(("steps", "kind"), [(1, "read_before_landed"), (1000, "failed_load_counted_loaded")])
def test_what_lands_behind_its_forward_or_never_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, kind: str
) -> None:
    restore, step = Manager.restore_scheduled_requests, continuous_api.ContinuousBatchProcessor._generation_step
    coming: list[list[Any]] = []

    def late(manager: Any, batch: Any) -> None:
        views = [own._copy_view for own in manager.cache.cache_allocators.values()]
        stood = [view.clone() for view in views]
        restore(manager, batch)
        for view, was in zip(views, stood, strict=True):
            changed = (view != was).any(dim=1)
            coming.append([steps, view, changed, view[changed].clone()])
            view[changed] = was[changed]

    def stepped(processor: Any, model: Any) -> None:
        step(processor, model)
        for waiting in list(coming):
            waiting[0] -= 1
            if waiting[0] == 0:
                _, view, changed, rows = waiting
                view[changed] = rows
                coming.remove(waiting)

    monkeypatch.setattr(Manager, "restore_scheduled_requests", late)
    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", stepped)
    with attach(tmp_path / "trace.arrow"):
        run("llama")
    assert said(tmp_path, "nothing_landed") == kind


def test_what_another_load_was_to_bring_to_a_block_is_not_this_ones() -> None:
    view = torch.arange(8, dtype=torch.uint8).repeat_interleave(16).reshape(8, 16)
    layout: Any = SimpleNamespace(index=0, page_size=4, num_slots=32, allocator=SimpleNamespace(_copy_view=view))
    layout.block_slots = lambda blocks: (np.array(blocks) * 4, np.full(len(blocks), 4))
    loads: list[CopyEnds] = []
    kept = SimpleNamespace(otherwise=lambda: np.arange(32))
    recorder: Any = SimpleNamespace(kv=[kept], kv_copy=lambda ends, **_: loads.append(ends))
    copies = HostCopies(recorder, [layout], lambda _: 7)
    there, *before = (hash_blocks(view, [block]) for block in (1, 2, 3))
    mine, theirs = (Load(n, layout, [b], [9], there, was) for n, b, was in zip("ab", (2, 3), before, strict=True))
    view[3] = view[1]
    for taken, found in (([mine, theirs], 4), ([mine], 4)):  # block 1 has it too, and nobody knows why
        copies.loaded(taken)
        copies.flush()
        assert loads[0].landed.tolist() == [found]
        loads.clear()
    view[1] = 0
    copies.loaded([mine])
    copies.flush()
    assert loads[0].landed.tolist() == [-1]


def said(folder: Path, cause: str) -> str:
    """Return the kind of a trace's first incident, whose findings of copies must have a cause."""
    trace = folder / "trace.arrow"
    replay(trace, settings=ReplaySettings(), report=folder)
    rows = find_incidents(folder, [trace]).rows
    causes = pq.read_table(folder / "findings.parquet", columns=["kind", "cause"]).to_pylist()
    assert {"kind": "copy_differs", "cause": cause} in causes
    return str(rows[0]["kind"])
