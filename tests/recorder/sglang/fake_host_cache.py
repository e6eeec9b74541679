"""A HiCache that copies at once, behind the fake engine; and what a replay says of what was recorded of it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
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
