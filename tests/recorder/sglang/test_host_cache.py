"""HiCache of SGLang's shape: what goes to the host and comes back is told slot by slot, or it is said that it is not."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.recorder.engines.sglang import layout as sglang_layout
from kvcanary.recorder.engines.sglang import transfers as sglang_transfers
from kvcanary.recorder.engines.sglang.transfers import copy_runs
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from .fake_engine import DIM, HEADS, SLOTS, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked

PROMPT = [5, 6, 7, 8, 9, 10]
HOST_SLOTS = 64


class HiCacheController:
    """Copies at once what SGLang's controller of this name copies by streams."""

    def __init__(self, runner: ModelRunner, allocator: TokenToKVPoolAllocator) -> None:
        self.pool, self.allocator = runner.token_to_kv_pool, allocator
        self.enable_storage = False
        self.mem_pool_host = SimpleNamespace(size=HOST_SLOTS)
        self.host = {name: torch.zeros(HOST_SLOTS, HEADS, DIM) for name in ("k_buffer", "v_buffer")}
        self.free_slots = list(range(HOST_SLOTS))
        self.damage: Callable[[dict[str, torch.Tensor]], None] = lambda host: None

    def write(self, device_indices: torch.Tensor, node_id: int = -1) -> torch.Tensor | None:
        if len(device_indices) > len(self.free_slots):
            return None
        taken = [self.free_slots.pop() for _ in device_indices]  # from the end: no rising run
        host_indices = torch.tensor(taken)
        for name, rows in self.host.items():
            rows[host_indices] = getattr(self.pool, name)[0][device_indices]
        return host_indices

    def load(self, host_indices: torch.Tensor, node_id: int = -1) -> torch.Tensor:
        self.damage(self.host)
        device_indices = self.allocator.alloc(len(host_indices))
        for name, rows in self.host.items():
            getattr(self.pool, name)[0][device_indices] = rows[host_indices]
        return device_indices


pytestmark = pytest.mark.usefixtures("process_goes_on")


def served(
    patch: pytest.MonkeyPatch, folder: Path, change: Callable[[HiCacheController], None] = lambda controller: None
) -> Path:
    """Serve a prompt, put it away, let others take its slots, load it back and serve it again; return the trace."""
    attachment = hooked(patch, RecordingSettings(folder=folder))

    def open_tree_cache(self: Scheduler) -> SimpleNamespace:
        controller = HiCacheController(self.runner, self.token_to_kv_pool_allocator)
        return SimpleNamespace(cache_controller=controller, load_back=lambda node: None)

    patch.setattr(Scheduler, "enable_hierarchical_cache", True)
    patch.setattr(Scheduler, "open_tree_cache", open_tree_cache)
    scheduler = Scheduler(ModelRunner(), TokenToKVPoolAllocator(SLOTS - 1, 1))
    controller: HiCacheController = scheduler.tree_cache.cache_controller
    first = Request("first", list(PROMPT), new_tokens=4)
    scheduler.step([first])
    slots = scheduler.rows.req_to_token[first.req_pool_idx, : len(PROMPT)].long().clone()
    host = controller.write(slots, node_id=3)
    assert host is not None
    assert controller.write(torch.arange(HOST_SLOTS + 1)) is None
    change(controller)
    while not first.finished():
        scheduler.step([first])
    for number in range(3):  # the freed slots come round again
        other = Request(f"other{number}", list(range(20, 44)), new_tokens=2)
        while not other.finished():
            scheduler.step([other])
    scheduler.tree_cache.load_back(None)
    loaded = controller.load(host, node_id=3)
    again = Request("again", [*PROMPT, 11], new_tokens=3)
    again.cached = len(PROMPT)
    scheduler.rows.alloc([again])
    scheduler.rows.req_to_token[again.req_pool_idx, : len(PROMPT)] = loaded.int()
    while not again.finished():
        scheduler.step([again])
    assert attachment.recording is not None
    attachment.recording.recorder.close()
    return attachment.recording.recorder.path


def slots_on_host(trace: Path) -> int:
    with TraceReader(trace) as reader:
        return reader.header.groups[0].host_num_slots


def judged(trace: Path) -> Summary:
    return replay(trace, settings=ReplaySettings(), report=None)


def test_what_comes_back_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = served(monkeypatch, tmp_path)
    assert slots_on_host(trace) == HOST_SLOTS
    copies = [e for e in read_trace(trace) if e.kind == "kv_copy"]
    assert [(e.scalar("note"), e.ints("copy_src_tier")[0], e.ints("copy_dst_tier")[0]) for e in copies] == [
        ("offload", 0, 1),
        ("load-back", 1, 0),
    ]
    assert [int(e.ints("copy_count").sum()) for e in copies] == [len(PROMPT)] * 2
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings) == ("clean", 0, 0)


def test_a_byte_that_changed_on_the_host_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(controller: HiCacheController) -> None:
        def damage(host: dict[str, torch.Tensor]) -> None:
            host["k_buffer"][HOST_SLOTS - 2, 0, 0] += 1

        controller.damage = damage

    summary = judged(served(monkeypatch, tmp_path, flip))
    assert summary.verdict.value == "corrupt"
    assert summary.violations > 0


def test_a_storage_behind_the_host_makes_a_load_back_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(controller: HiCacheController) -> None:
        controller.enable_storage = True

    trace = served(monkeypatch, tmp_path, attach)
    losses = [e.scalar("note") for e in read_trace(trace) if e.kind == "loss"]
    assert losses == ["KV was loaded back from the host cache, which is filled from a storage"]
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations) == ("inconclusive", 0)


def test_another_controller_makes_every_load_back_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_layout, "HOST_CACHE", "AnotherCacheController")
    trace = served(monkeypatch, tmp_path)
    assert slots_on_host(trace) == 0
    kinds = [e.kind for e in read_trace(trace)]
    assert "loss" in kinds
    assert "kv_copy" not in kinds


def test_copies_that_cannot_be_told_make_every_load_back_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("as a newer version might")

    monkeypatch.setattr(sglang_transfers, "copy_runs", fails)
    trace = served(monkeypatch, tmp_path)
    notes = [e.scalar("note") for e in read_trace(trace) if e.kind == "loss"]
    assert notes[0].startswith("SGLang adapter, on_host_cache is no longer recorded: RuntimeError")
    assert notes[-1] == "KV was loaded back from the host cache, which is not recorded"
    assert judged(trace).verdict.value == "inconclusive"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_runs_are_the_pairs(pairs: list[tuple[int, int]]) -> None:
    src, dst = np.array(pairs, np.int64).reshape(-1, 2).T
    starts, others, counts = copy_runs(src, dst)
    told = [(s + i, d + i) for s, d, n in zip(starts, others, counts, strict=True) for i in range(n)]
    assert told == pairs
    assert (counts > 0).all()
