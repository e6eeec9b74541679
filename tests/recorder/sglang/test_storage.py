"""A storage behind HiCache's pool on the host: what went there, what came back, and what somebody else has put there."""

from collections.abc import Callable
from contextlib import nullcontext as no_error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.ops.end_hash import triton as end_hash
from kvcanary.recorder.engines.common.hooking import wrap_method
from kvcanary.recorder.engines.sglang.connectors import storage
from kvcanary.recorder.engines.sglang.connectors.storage import Move, Storage
from kvcanary.recorder.trace.reader import read_trace

from . import fake_host_cache
from .fake_host_cache import HOST_SLOTS, PROMPT, judged, losses, named, served

PAGE = 4
FIRST = 16  # of the storage's slots


class HiCacheController(fake_host_cache.HiCacheController):
    """Has a storage, by key; controllers are known by the names of their classes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.enable_storage, self.stored = True, {}

    def page_set_func(self, keys: list[str], host: torch.Tensor, extra: object = None) -> bool:
        for key, slot in zip(keys, host.tolist(), strict=True):
            self.stored[key] = [layer[slot].clone() for _, layer in self.layers()]
        return True

    def page_get_func(self, operation: object, keys: list[str], host: torch.Tensor, extra: object = None) -> int:
        for n, (key, slot) in enumerate(zip(keys, host.tolist(), strict=True)):
            if key not in self.stored:
                return n
            for (_, layer), row in zip(self.layers(), self.stored[key], strict=True):
                layer[slot] = row
        return len(keys)


class Storing:
    """Puts the prompt away in the storage, and has it come back from there; `change` does something to what is stored."""

    def __init__(self, change: Callable[[HiCacheController, list[str]], object], keys: str = "abcdef") -> None:
        self.calls, self.change, self.keys = 0, change, list(keys)

    def __call__(self, controller: fake_host_cache.HiCacheController) -> None:
        assert isinstance(controller, HiCacheController)
        self.calls += 1
        if self.calls == 1:
            return
        host = torch.arange(HOST_SLOTS - 2 * len(PROMPT), HOST_SLOTS - len(PROMPT)).flip(0)
        controller.page_set_func(list("abcdef"), host)
        for _, layer in controller.layers():
            layer[host] = 0
        self.change(controller, self.keys)
        controller.page_get_func(None, self.keys, host)


pytestmark = pytest.mark.usefixtures("process_goes_on")


def copies(trace: Path) -> list[tuple[str, int]]:
    """Return the notes of a trace's copies, and how many slots each copies."""
    return [(e.scalar("note"), int(e.ints("copy_count").sum())) for e in read_trace(trace) if e.kind == "kv_copy"]


def unknown(trace: Path) -> int:
    """Return how many slots are said to hold what nobody knows."""
    ends = [e for e in read_trace(trace) if e.kind == "transfer" and e.scalar("status") == "end"]
    return sum(int(e.ints("slot_count").sum()) for e in ends)


def test_what_comes_back_from_a_storage_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = served(monkeypatch, tmp_path, Storing(lambda *_: None), HiCacheController)
    count = len(PROMPT)
    assert copies(trace)[-3:] == [("to storage", count), ("from storage", count), ("load-back", count)]
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings, losses(trace)) == ("clean", 0, 0, [])
    assert unknown(trace) == 0


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("known", [True, False])
def test_on_a_gpu_it_is_recorded_and_not_hashed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    for kernels in (model_forward, end_hash):
        monkeypatch.setattr(kernels, "PROGRAMS", 4)
    monkeypatch.setattr(model_forward, "TILE", 32)
    trace = served(monkeypatch, tmp_path, Storing(lambda *_: None if known else put_by_another(*_)), HiCacheController)
    assert copies(trace)[-1] == ("load-back", len(PROMPT) if known else 3)
    assert unknown(trace) == (0 if known else 3)
    load = next(e for e in read_trace(trace) if e.scalar("note") == "load-back")
    assert load.ints("copy_src_hash").all()
    assert load.ints("copy_src_hash").tolist() == load.ints("copy_dst_hash").tolist()
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings) == ("clean", 0, 0)


def put_by_another(controller: HiCacheController, keys: list[str]) -> None:
    """Half of the prompt comes from pages that another server has stored."""
    for n, key in enumerate("xyz"):
        controller.stored[key] = controller.stored[keys[n]]
        keys[n] = key


def test_what_another_has_stored_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = served(monkeypatch, tmp_path, Storing(put_by_another), HiCacheController)
    assert copies(trace)[-3:] == [("to storage", 6), ("from storage", 3), ("load-back", 3)]
    assert unknown(trace) == 3
    summary = judged(trace)
    assert (summary.verdict.value, summary.violations, summary.findings) == ("clean", 0, 0)


def damage(controller: HiCacheController, keys: list[str]) -> None:
    controller.stored["c"][0].add_(1)


def mix_up(controller: HiCacheController, keys: list[str]) -> None:
    controller.stored["c"] = controller.stored["d"]


def rename(controller: HiCacheController, keys: list[str]) -> None:
    keys[2] = "d"


@pytest.mark.parametrize(
    ("change", "cause", "incident"),
    [
        (damage, "changed_in_store", "stored_wrong"),
        (mix_up, "loaded_another", "load_of_other_prefix"),
        (rename, "", "load_of_other_prefix"),
    ],
)
def test_a_storage_that_lies_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[HiCacheController, list[str]], None],
    cause: str,
    incident: str,
) -> None:
    verdict, causes, first = named(served(monkeypatch, tmp_path, Storing(change), HiCacheController))
    assert (verdict, causes, first) == ("corrupt", {cause} - {""}, incident)


class Controller:
    """Whatever the storage answers, without one."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def page_set_func(self, keys: list[str], host: torch.Tensor) -> Any:
        return self._answer()

    def page_get_func(self, operation: object, keys: list[str], host: torch.Tensor) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Followed:
    """A storage with places for so many pages, and what was said of it."""

    def __init__(self, pages: int) -> None:
        self.said: list[tuple[bool, list[int], list[int]]] = []
        self.controller = Controller()
        self.storage = Storage(FIRST, pages * PAGE, PAGE, lambda pages: pages + 1, self.moved)
        for name, hook in self.storage.hooks().items():
            assert wrap_method(self.controller, name, hook, lambda *_: pytest.fail("a hook failed"))

    def moved(self, move: Move, places: np.ndarray) -> None:
        assert move.hashes.tolist() == (move.host + 1).tolist()
        self.said.append((move.to_storage, move.host.tolist(), places.tolist()))

    def put(self, keys: str, pages: list[int], answer: Any = True) -> None:
        self.controller.answers.append(answer)
        self.controller.page_set_func(list(keys), slots_of(pages))

    def get(self, keys: str, pages: list[int], answer: Any) -> None:
        self.controller.answers.append(answer)
        self.controller.page_get_func(None, list(keys), slots_of(pages))

    def flushed(self) -> list[tuple[bool, list[int], list[int]]]:
        self.storage.flush()
        said, self.said = self.said, []
        return said


def slots_of(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page + n for page in pages for n in range(PAGE)])


def test_the_key_that_was_stored_longest_ago_gives_its_place_to_another() -> None:
    followed = Followed(2)
    followed.put("ab", [0, 4])
    ((_, _, (a, b)),) = followed.flushed()
    assert {a, b} == {FIRST, FIRST + PAGE}
    followed.put("a", [8])
    followed.put("c", [12])
    assert followed.flushed() == [(True, [8], [a]), (True, [12], [b])]
    followed.get("cab", [0, 4, 8], 3)
    assert followed.flushed() == [(False, [0, 4], [b, a])]
    assert followed.storage.unknown(np.arange(12)).tolist() == [False] * 8 + [True] * 4
    followed.storage.filled(np.array([9]))
    assert not followed.storage.unknown(np.arange(12)).any()


@pytest.mark.parametrize("answer", [False, None, RuntimeError("full")])
def test_of_a_store_that_failed_nobody_knows_what_lies_under_its_key(answer: Any) -> None:
    followed = Followed(2)
    followed.put("a", [0])
    followed.flushed()
    with pytest.raises(RuntimeError) if isinstance(answer, Exception) else no_error():
        followed.put("a", [4], answer)
    followed.get("a", [8], 1)
    assert followed.flushed() == []
    assert followed.storage.unknown(np.array([8])).all()


@pytest.mark.parametrize("answer", [1, RuntimeError("gone")])
def test_of_a_fetch_that_breaks_off_the_rest_is_unknown(answer: Any) -> None:
    followed = Followed(2)
    followed.put("ab", [0, 4])
    followed.flushed()
    with pytest.raises(RuntimeError) if isinstance(answer, Exception) else no_error():
        followed.get("ab", [8, 12], answer)
    assert followed.storage.overwritten(np.array([4, 8, 12])).tolist() == [False, True, True]
    came = 0 if isinstance(answer, Exception) else 1
    assert len(followed.flushed()) == came
    assert followed.storage.unknown(np.array([8, 12])).tolist() == [not came, True]
    assert not followed.storage.overwritten(np.array([8])).any()


def test_what_fetches_have_begun_to_fill_since_is_known_for_a_while() -> None:
    followed, slots = Followed(2), np.array([0, 4, 9, 12])
    followed.get("x", [0], 1)
    begun = followed.storage.fetches
    assert not followed.storage.fetched_since(begun, slots).any()
    followed.get("yz", [8, 4], 0)
    assert followed.storage.fetched_since(begun, slots).tolist() == [False, True, True, False]
    assert followed.storage.fetched_since(begun - 1, slots).tolist() == [True, True, True, False]
    for _ in range(storage.NEWEST):
        followed.get("x", [0], 1)
    assert followed.storage.fetched_since(begun, slots).all()  # too long ago to tell


def test_what_is_stored_from_an_unknown_page_stays_unknown() -> None:
    followed = Followed(2)
    followed.get("x", [0], 1)
    followed.put("y", [0])
    followed.get("y", [4], 1)
    assert followed.flushed() == []
    assert followed.storage.unknown(np.array([0, 4])).all()
