"""HiCache of SGLang's shape: what goes to the host and comes back is told slot by slot, or it is said that it is not."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.kernels.capture import model_forward
from kvcanary.recorder.engines.sglang import history, host_cache
from kvcanary.recorder.engines.sglang.host_cache import copy_runs
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from .fake_engine import DIM, HEADS, SLOTS, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked

PROMPT = [5, 6, 7, 8, 9, 10]
HOST_SLOTS = 64


class MHATokenToKVPoolHost:
    """The host's copies of one layer's K and V, each `[1, slots, heads, dim]`."""

    def __init__(self) -> None:
        self.layout, self.size = "layer_first", HOST_SLOTS
        self.k_buffer, self.v_buffer = (torch.zeros(1, HOST_SLOTS, HEADS, DIM) for _ in "KV")


class Operation(NamedTuple):
    host_indices: torch.Tensor
    device_indices: torch.Tensor


class HiCacheController:
    """Copies at once what SGLang's controller of this name copies by streams."""

    page_size = 1

    def __init__(self, runner: ModelRunner, allocator: TokenToKVPoolAllocator) -> None:
        self.mem_pool_device, self.allocator = runner.token_to_kv_pool, allocator
        self.enable_storage = False
        self.pool = MHATokenToKVPoolHost()
        self.mem_pool_host: Any = self.pool
        self.write_queue: list[Operation] = []
        self.load_queue: list[Operation] = []
        self.ack_write_queue: list[object] = []
        self.free_slots = list(range(HOST_SLOTS))
        self.after_store: Callable[[torch.Tensor], object] = lambda host: None
        self.late: list[Callable[[], None]] | None = None  # loads that are put off
        self.lands = True
        # Which rows are read and written in the stead of those that are meant.
        self.stored_to: Callable[[torch.Tensor], torch.Tensor] = lambda host: host
        self.read_from: Callable[[torch.Tensor], torch.Tensor] = lambda host: host
        self.loaded_to: Callable[[torch.Tensor], torch.Tensor] = lambda device: device

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pool, host = self.mem_pool_device, self.pool
        return [(pool.k_buffer[0], host.k_buffer[0]), (pool.v_buffer[0], host.v_buffer[0])]

    def write(self, device_indices: torch.Tensor, node_id: int = -1) -> torch.Tensor | None:
        if len(device_indices) > len(self.free_slots):
            return None
        taken = [self.free_slots.pop() for _ in device_indices]  # from the end: no rising run
        self.write_queue.append(Operation(torch.tensor(taken), device_indices))
        self.start_writing()
        return torch.tensor(taken)

    def start_writing(self) -> None:
        for host, device in self.write_queue:
            for here, there in self.layers():
                there[self.stored_to(host)] = here[device]
            self.after_store(host)
            self.ack_write_queue.append(object())
        self.write_queue.clear()

    def load(self, host_indices: torch.Tensor, node_id: int = -1) -> torch.Tensor:
        device_indices = self.allocator.alloc(len(host_indices))
        self.load_queue.append(Operation(host_indices, device_indices))
        return device_indices

    def start_loading(self) -> None:
        queued, self.load_queue[:] = list(self.load_queue), []

        def copy() -> None:
            for host, device in queued:
                for here, there in self.layers():
                    here[self.loaded_to(device)] = there[self.read_from(host)]

        if self.late is None:
            copy()
        else:
            self.late.append(copy)


class HybridCacheController(HiCacheController):
    """As SGLang builds it for its unified tree: with a group of pools on the host."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        entry = SimpleNamespace(
            host_pool=self.pool, device_pool=self.mem_pool_device, packed_draft_device_pools=(), name="kv"
        )
        self.mem_pool_host = SimpleNamespace(size=HOST_SLOTS, entries=[entry])


pytestmark = pytest.mark.usefixtures("process_goes_on")


def served(
    patch: pytest.MonkeyPatch,
    folder: Path,
    change: Callable[[HiCacheController], None] = lambda controller: None,
    kind: type[HiCacheController] = HiCacheController,
    wait: Callable[[Scheduler, torch.Tensor], None] = lambda scheduler, loaded: None,
    sweep_every: int = 0,
) -> Path:
    """Serve a prompt, put it away, let others take its slots, load it back and serve it again; return the trace.

    `change` is called when the prompt is about to be put away, and again before it comes back.
    """
    attachment = hooked(patch, RecordingSettings(folder=folder, sweep_every=sweep_every))

    def open_tree_cache(self: Scheduler) -> SimpleNamespace:
        controller = kind(self.runner, self.token_to_kv_pool_allocator)
        tree = SimpleNamespace(cache_controller=controller, load_back=lambda node: None)
        tree.init_load_back = lambda node: tree.load_back(node)
        return tree

    patch.setattr(Scheduler, "enable_hierarchical_cache", True)
    patch.setattr(Scheduler, "open_tree_cache", open_tree_cache)
    scheduler = Scheduler(ModelRunner(), TokenToKVPoolAllocator(SLOTS - 1, 1))
    controller: HiCacheController = scheduler.tree_cache.cache_controller

    def serve(request: Request) -> None:
        while not request.finished():
            scheduler.step([request])

    other = Request("before", [30, 31, 32, 33, 34, 35], new_tokens=4)
    scheduler.step([other])
    slots = scheduler.rows.req_to_token[other.req_pool_idx, : len(PROMPT)].long().clone()
    assert controller.write(slots, node_id=2) is not None
    serve(other)
    first = Request("first", list(PROMPT), new_tokens=4)
    scheduler.step([first])
    slots = scheduler.rows.req_to_token[first.req_pool_idx, : len(PROMPT)].long().clone()
    change(controller)
    host = controller.write(slots, node_id=3)
    assert host is not None
    assert controller.write(torch.arange(HOST_SLOTS + 1)) is None
    serve(first)
    controller.ack_write_queue.clear()
    for number in range(4):  # the freed slots come round again
        serve(Request(f"other{number}", list(range(20, 44)), new_tokens=2))
    change(controller)
    scheduler.tree_cache.init_load_back(None)
    loaded = controller.load(host, node_id=3)
    wait(scheduler, loaded)
    controller.start_loading()
    again = Request("again", [*PROMPT, 11], new_tokens=3)
    again.cached = len(PROMPT)
    scheduler.rows.alloc([again])
    scheduler.rows.req_to_token[again.req_pool_idx, : len(PROMPT)] = loaded.int()
    while not again.finished():
        scheduler.step([again])
        for copy in (controller.late or ()) if controller.lands else ():
            copy()
    assert attachment.recording is not None
    attachment.recording.recorder.close()
    return attachment.recording.recorder.path


def test_forwards_between_a_load_and_its_beginning_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose KV is loaded may have to wait: the prefix cache holds its slots already, and a walk sees them."""
    in_cache = torch.zeros(0, dtype=torch.int64)

    def walk(radix_cache: object, *, unlocked_only: bool) -> SimpleNamespace:
        prev = torch.cat((torch.full((min(len(in_cache), 1),), -1), in_cache[:-1]))
        return SimpleNamespace(slot_indices=in_cache, positions=torch.arange(len(in_cache)), prev_slot_indices=prev)

    monkeypatch.setattr(history.RadixCacheWalk, "walker", lambda self: walk)

    def wait(scheduler: Scheduler, loaded: torch.Tensor) -> None:
        nonlocal in_cache
        in_cache = loaded
        for number in range(3):
            scheduler.step([Request(f"between{number}", [40 + number, 41, 42], new_tokens=1)])

    trace = served(monkeypatch, tmp_path, wait=wait, sweep_every=1)
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings) == ("clean", 0, 0)


def slots_on_host(trace: Path) -> int:
    with TraceReader(trace) as reader:
        return reader.header.groups[0].host_num_slots


def judged(trace: Path) -> Summary:
    return replay(trace, settings=ReplaySettings(), report=None)


def named(trace: Path) -> tuple[str, set[str], str]:
    """Return a trace's verdict, the causes of its findings of copies, and its first incident's kind."""
    report = trace.parent
    summary = replay(trace, settings=ReplaySettings(), report=report)
    found = pq.read_table(report / "findings.parquet", columns=["kind", "cause"]).to_pylist()
    incidents = find_incidents(report, [trace]).rows
    return (
        summary.verdict.value,
        {row["cause"] for row in found if row["kind"] == "copy_differs"},
        str(incidents[0]["kind"]),
    )


def losses(trace: Path) -> list[str]:
    return [e.scalar("note") for e in read_trace(trace) if e.kind == "loss"]


CONTROLLERS = pytest.mark.parametrize("kind", [HiCacheController, HybridCacheController])


@CONTROLLERS
def test_what_comes_back_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[HiCacheController]
) -> None:
    trace = served(monkeypatch, tmp_path, kind=kind)
    assert slots_on_host(trace) == HOST_SLOTS
    copies = [e for e in read_trace(trace) if e.kind == "kv_copy"]
    assert [(e.scalar("note"), e.ints("copy_src_tier")[0], e.ints("copy_dst_tier")[0]) for e in copies] == [
        ("offload", 0, 1),
        ("offload", 0, 1),
        ("stored", 1, 1),
        ("stored", 1, 1),
        ("load-back", 1, 0),
    ]
    assert [int(e.ints("copy_count").sum()) for e in copies] == [len(PROMPT), len(PROMPT), 0, 0, len(PROMPT)]
    stored, loaded = copies[1], copies[4]
    assert stored.ints("copy_src_hash").all()
    for hashes in (copies[3].ints("copy_dst_hash"), loaded.ints("copy_src_hash"), loaded.ints("copy_dst_hash")):
        assert hashes.tolist() == stored.ints("copy_src_hash").tolist()
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings) == ("clean", 0, 0)
    assert losses(trace) == []


class Fault:
    """What goes wrong with a prompt that is put away and comes back; `calls` says which of the two is to come."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def __call__(self, controller: HiCacheController) -> None:
        self.calls += 1
        away, name = self.calls == 1, self.name
        if name == "stored damaged" and away:
            controller.after_store = lambda host: controller.pool.k_buffer[0].index_fill_(0, host[:1], 7.0)
        if name == "two pages to one" and away:
            controller.stored_to = lambda host: torch.cat((host[1:2], host[1:]))
        if name == "one place for two" and away:
            controller.free_slots[-1] = controller.free_slots[-2]
        if name == "overwritten" and not away:
            controller.pool.k_buffer[0, HOST_SLOTS - len(PROMPT) - 2, 0, 0] += 1
        if name == "another page" and not away:
            controller.read_from = lambda host: host + len(PROMPT)
        if name == "another slot" and not away:
            controller.loaded_to = lambda device: (device + 20) % SLOTS
        if name in ("late", "never") and not away:
            controller.late = []
            controller.lands = name == "late"


@CONTROLLERS
@pytest.mark.parametrize(
    ("fault", "cause", "incident"),
    [
        ("stored damaged", "stored_wrong", "stored_wrong"),
        ("two pages to one", "stored_wrong", "stored_wrong"),
        ("one place for two", "two_to_one", "host_copy_overwritten"),
        ("overwritten", "changed_in_store", "stored_wrong"),
        ("another page", "loaded_another", "load_of_other_prefix"),
        ("another slot", "landed_elsewhere", "load_landed_elsewhere"),
        ("late", "nothing_landed", "read_before_landed"),
        ("never", "nothing_landed", "failed_load_counted_loaded"),
    ],
)
def test_the_hop_that_lied_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[HiCacheController],
    fault: str,
    cause: str,
    incident: str,
) -> None:
    verdict, causes, first = named(served(monkeypatch, tmp_path, Fault(fault), kind))
    assert verdict == "corrupt"
    assert cause in causes
    assert first == incident


def test_pools_that_lie_otherwise_are_recorded_without_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(controller: HiCacheController) -> None:
        controller.pool.layout = "another"

    class Another(HiCacheController):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            turn(self)

    Another.__name__ = "HiCacheController"
    trace = served(monkeypatch, tmp_path, kind=Another)
    copies = [e for e in read_trace(trace) if e.kind == "kv_copy"]
    assert [e.scalar("note") for e in copies] == ["offload", "offload", "load-back"]
    assert not any(len(e.ints("copy_src_hash")) for e in copies)
    assert judged(trace).verdict.value == "clean"


@CONTROLLERS
@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_copies_are_recorded_without_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[HiCacheController]
) -> None:
    monkeypatch.setattr(model_forward, "PROGRAMS", 4)
    monkeypatch.setattr(model_forward, "TILE", 32)
    trace = served(monkeypatch, tmp_path, kind=kind)
    copies = [e for e in read_trace(trace) if e.kind == "kv_copy"]
    assert [e.scalar("note") for e in copies] == ["offload", "offload", "load-back"]
    assert [int(e.ints("copy_count").sum()) for e in copies] == [len(PROMPT)] * 3
    assert not any(len(e.ints("copy_src_hash")) for e in copies)
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings) == ("clean", 0, 0)


def test_a_storage_behind_the_host_makes_a_load_back_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(controller: HiCacheController) -> None:
        controller.enable_storage = True

    trace = served(monkeypatch, tmp_path, attach)
    assert losses(trace) == ["KV was loaded back from the host cache, which is filled from a storage"]
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations) == ("inconclusive", 0)


def test_what_is_not_known_makes_every_load_back_unknown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AnotherCacheController(HiCacheController):
        pass

    class Draft(HybridCacheController):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mem_pool_host.entries[0].packed_draft_device_pools = (object(),)

    class OlderDraft(HiCacheController):
        has_draft = True

    class TwoPools(HybridCacheController):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mem_pool_host.entries.append(SimpleNamespace(name="mamba"))

    class Buffer(HybridCacheController):
        host_memory_mode = "buffer_only"

    for kind in (Draft, OlderDraft, TwoPools, Buffer):
        kind.__name__ = "HybridCacheController"
    for number, kind in enumerate((AnotherCacheController, Draft, OlderDraft, TwoPools, Buffer)):
        with monkeypatch.context() as patch:
            trace = served(patch, tmp_path / str(number), kind=kind)
        assert slots_on_host(trace) == 0
        assert losses(trace) == ["KV was loaded back from the host cache, which is not recorded"]
        assert "kv_copy" not in [e.kind for e in read_trace(trace)]


def test_copies_that_cannot_be_told_make_every_load_back_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("as a newer version might")

    monkeypatch.setattr(host_cache, "_operations", fails)
    trace = served(monkeypatch, tmp_path)
    assert losses(trace)[0].startswith("SGLang adapter, on_host_cache is no longer recorded: RuntimeError")
    assert losses(trace)[-1] == "KV was loaded back from the host cache, which is not recorded"
    assert judged(trace).verdict.value == "inconclusive"


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_a_page_is_the_same_in_every_layout(layout: str, page_size: int) -> None:
    layers, pages, heads, dim = 3, 5, 2, 4
    slots = pages * page_size
    each = torch.arange(layers * slots * heads * dim).view(layers, slots, heads, dim)
    shapes = {
        "layer_first": (layers, slots, heads, dim),
        "page_first": (slots, layers, heads, dim),
        "page_first_direct": (pages, layers, page_size, heads, dim),
        "page_head": (pages, heads, page_size, layers, dim),
    }
    buffer = torch.full(shapes[layout], -1)
    for layer in range(layers):
        for slot in range(slots):
            page, offset = divmod(slot, page_size)
            if layout == "layer_first":
                buffer[layer, slot] = each[layer, slot]
            elif layout == "page_first":
                buffer[slot, layer] = each[layer, slot]
            elif layout == "page_first_direct":
                buffer[page, layer, offset] = each[layer, slot]
            else:
                buffer[page, :, offset, layer] = each[layer, slot]
    assert torch.equal(host_cache.by_layer(buffer, layout, page_size).reshape(each.shape), each)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_runs_are_the_pairs(pairs: list[tuple[int, int]]) -> None:
    src, dst = np.array(pairs, np.int64).reshape(-1, 2).T
    starts, others, counts = copy_runs(src, dst)
    told = [(s + i, d + i) for s, d, n in zip(starts, others, counts, strict=True) for i in range(n)]
    assert told == pairs
    assert (counts > 0).all()
