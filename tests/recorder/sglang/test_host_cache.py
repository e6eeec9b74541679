"""HiCache of SGLang's shape: what goes to the host and comes back is told slot by slot, or it is said that it is not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.ops.end_hash import triton as end_hash
from kvcanary.recorder.engines.sglang import history
from kvcanary.recorder.engines.sglang.connectors import device_copies, host_cache, host_pools
from kvcanary.recorder.engines.sglang.connectors.host_copies import HostCopies
from kvcanary.recorder.engines.sglang.connectors.host_pools import by_layer, copy_runs
from kvcanary.recorder.trace.reader import TraceReader, read_trace

from .fake_engine import SLOTS, Request, Scheduler
from .fake_host_cache import HOST_SLOTS, PROMPT, HiCacheController, HybridCacheController, judged, losses, named, served

pytestmark = [pytest.mark.usefixtures("process_goes_on"), pytest.mark.one_in(2)]  # make fuzz goes through all


def test_forwards_between_a_load_and_its_beginning_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose KV is loaded may have to wait: the prefix cache holds its slots already, and a walk sees them."""
    in_cache = torch.zeros(0, dtype=torch.int64)

    def walk(radix_cache: object, *, unlocked_only: bool) -> SimpleNamespace:
        prev = torch.cat((torch.full((min(len(in_cache), 1),), -1), in_cache[:-1]))
        return SimpleNamespace(slot_indices=in_cache, positions=torch.arange(len(in_cache)), prev_slot_indices=prev)

    monkeypatch.setattr(history, "walker", lambda: walk)

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


def test_what_another_load_was_to_bring_to_a_page_is_not_this_ones() -> None:
    here = torch.arange(8).repeat_interleave(4).reshape(8, 1, 4)  # of pages of one slot
    loads: list[Any] = []
    header = SimpleNamespace(groups=[SimpleNamespace(num_slots=8)])
    kept = SimpleNamespace(otherwise=lambda: np.arange(8))
    recorder: Any = SimpleNamespace(header=header, kv=[kept], kv_copy=lambda ends, **_: loads.append(ends))
    copies = HostCopies(SimpleNamespace(page_size=1), recorder, [here], [here.clone()])
    known = np.zeros(1, np.bool_)
    for slots, found in (((2, 3), -1), ((2,), 1)):  # page 1 of the pool has it, too, then, and nobody knows why
        here[1] = 0 if found < 0 else 1
        for slot in slots:
            with copies.load([(torch.tensor([slot]), torch.tensor([1]))], known):
                here[3] = 1
        copies.before_forward()
        assert loads[0].landed.tolist() == [found]
        loads.clear()


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


@pytest.fixture
def on_a_small_gpu(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in (model_forward, end_hash):
        monkeypatch.setattr(kernels, "PROGRAMS", 4)
    monkeypatch.setattr(model_forward, "TILE", 32)


@CONTROLLERS
@pytest.mark.usefixtures("on_a_small_gpu")
def test_on_a_gpu_both_ends_are_hashed_where_the_copies_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[HiCacheController]
) -> None:
    trace = served(monkeypatch, tmp_path, kind=kind)
    copies = [e for e in read_trace(trace) if e.kind == "kv_copy"]
    assert [e.scalar("note") for e in copies] == ["offload", "stored", "offload", "stored", "load-back"]
    assert [int(e.ints("copy_count").sum()) for e in copies] == [len(PROMPT), 0, len(PROMPT), 0, len(PROMPT)]
    assert copies[2].ints("copy_src_hash").all()
    for hashes in (copies[3].ints("copy_dst_hash"), copies[4].ints("copy_src_hash"), copies[4].ints("copy_dst_hash")):
        assert hashes.tolist() == copies[2].ints("copy_src_hash").tolist()
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings) == ("clean", 0, 0)


@pytest.mark.parametrize(
    ("fault", "cause", "incident"),
    [
        ("stored damaged", "stored_wrong", "stored_wrong"),
        ("two pages to one", "stored_wrong", "stored_wrong"),
        ("overwritten", "changed_in_store", "stored_wrong"),
        ("another page", "loaded_another", "load_of_other_prefix"),
        ("never", "nothing_landed", "failed_load_counted_loaded"),
    ],
)
@pytest.mark.usefixtures("on_a_small_gpu")
def test_on_a_gpu_the_hop_that_lied_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str, incident: str
) -> None:
    verdict, causes, first = named(served(monkeypatch, tmp_path, Fault(fault)))
    assert verdict == "corrupt"
    assert cause in causes
    assert first == incident


@pytest.mark.usefixtures("on_a_small_gpu")
def test_on_a_gpu_a_load_that_waits_is_unknown_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(scheduler: Scheduler, loaded: torch.Tensor) -> None:
        scheduler.step([Request("between", [40, 41, 42], new_tokens=1)])

    trace = served(monkeypatch, tmp_path, wait=wait)
    told = [(e.kind, e.scalar("note")) for e in read_trace(trace) if e.kind in ("kv_copy", "transfer")]
    assert told[-3:] == [("transfer", "a load that has not begun")] * 2 + [("kv_copy", "load-back")]
    assert judged(trace).verdict.value == "clean"


@pytest.mark.usefixtures("on_a_small_gpu")
def test_on_a_gpu_other_than_whole_pages_end_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pages(HiCacheController):
        page_size = 4

    Pages.__name__ = "HiCacheController"
    trace = served(monkeypatch, tmp_path, kind=Pages)
    assert set(losses(trace)) == {"HiCache copies other than whole pages of 4 slots"}
    assert judged(trace).verdict.value == "inconclusive"


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_a_device_finds_pages_in_layouts_whose_tokens_lie_in_one_piece(layout: str) -> None:
    """Whole pages, or the first and last token of each where they lie apart."""
    pages, size, heads, dim = 5, 4, 2, 3
    here = [torch.randn(pages, size, heads, dim) for _ in range(2)]
    by_axes = {"layer_first": (0, 1, 2, 3, 4), "page_first": (1, 2, 0, 3, 4)} | host_pools.AXES
    order = by_axes[layout] if layout not in host_pools.AXES else np.argsort(by_axes[layout]).tolist()
    there = torch.stack(here).permute(*order).contiguous().permute(*np.argsort(order).tolist())
    if layout == "page_head":
        with pytest.raises(ValueError, match="the bytes of a token lie apart"):
            device_copies._rows(here, [*there], size)
        return
    mine, theirs = device_copies._rows(here, [*there], size)
    parts = [(0, 3)] * 2 if layout == "page_first" else [(slice(None),)] * 2
    expected = [
        layer[:, token].reshape(pages, -1) for layer, tokens in zip(here, parts, strict=True) for token in tokens
    ]
    for found in (mine, theirs):
        assert [part.view(torch.float32).tolist() for part in found] == [part.tolist() for part in expected]


def test_a_storage_behind_the_host_makes_a_load_back_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(controller: HiCacheController) -> None:
        controller.enable_storage = True

    trace = served(monkeypatch, tmp_path, attach)
    assert losses(trace) == ["KV was loaded back from the host cache, which is filled from a storage attached since"]
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
    assert torch.equal(by_layer(buffer, layout, page_size).reshape(each.shape), each)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_runs_are_the_pairs(pairs: list[tuple[int, int]]) -> None:
    src, dst = np.array(pairs, np.int64).reshape(-1, 2).T
    starts, others, counts = copy_runs(src, dst)
    told = [(s + i, d + i) for s, d, n in zip(starts, others, counts, strict=True) for i in range(n)]
    assert told == pairs
    assert (counts > 0).all()
