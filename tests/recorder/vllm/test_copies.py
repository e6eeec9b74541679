"""A connector's saves and loads as they are recorded: which slots, which pages of the host tier, what lay at both ends."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.vllm.connectors.copies import ConnectorCopies, ExternalSlots, HostPages
from kvcanary.recorder.engines.vllm.connectors.storages import StepStorage
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace

from .groups import group

BLOCKS, SIZE = 8, 4


class Connector:
    """Keeps blocks by key; `lands[block]` is where a load goes instead."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv, self.kept, self.lands = kv, {}, {}
        self._connector_metadata = self.broken = None
        self.errors: set[int] = set()

    def start_load_kv(self) -> None:
        for _, _, block, key in self._connector_metadata["loads"]:
            if block not in self.errors and key in self.kept:
                self.kv[self.lands.get(block, block)] = self.kept[key]

    def wait_for_save(self) -> None:
        for _, _, block, key in self._connector_metadata["stores"]:
            self.kept[key] = self.kv[block].clone()

    def get_finished(self, *_: Any) -> tuple[None, None]:
        return None, None

    def stores(self, metadata: Any) -> Any:
        if self.broken:
            raise ValueError("other metadata than expected")
        return metadata["stores"]

    def loads(self, metadata: Any) -> Any:
        return metadata["loads"]

    def failed(self) -> set[int]:
        return self.errors

    def there(self, _: Any, key: str) -> Any:
        return [self.kept[key].transpose(0, 1).view(torch.int32).numpy()] if key in self.kept else None


class Played:
    def __init__(self, path: Path) -> None:
        self.path = path
        kv = torch.arange(BLOCKS * 2 * SIZE * 8, dtype=torch.float32).reshape(BLOCKS, 2, SIZE, 8)
        self.connector = Connector(kv)
        own = replace(group(SIZE), num_blocks=BLOCKS, host_num_slots=3 * SIZE)
        pool = PoolGroup(name="full", num_slots=BLOCKS * SIZE, page_size=SIZE, host_num_slots=3 * SIZE)
        self.recorder = Recorder(path, TraceHeader(groups=(pool,), tables=(StateTable(rows=4, width=32),)))
        self.copied: list[tuple[list[int], list[int]]] = []
        kept = SimpleNamespace(copied=lambda _, src, dst, **__: self.copied.append((src.tolist(), dst.tolist())))
        layout: Any = SimpleNamespace(groups=[own], kv=kept)
        layers = {"l": SimpleNamespace(kv_cache=kv)}
        self.faults: list[str] = []
        self.other, pages = Connector(kv), HostPages(layout)
        for connector in (self.other, self.connector):
            storage = StepStorage(connector, connector, layers, layout)
            self.copies = ConnectorCopies(storage, layout, self.recorder, pages)
            self.copies.attach(lambda hook, _: self.faults.append(hook))

    def step(self, stores: Any = (), loads: Any = (), held: tuple[int, ...] = ()) -> None:
        """A step that loads and then saves `(block, key)`; its request holds the blocks that are loaded, if not others."""
        named = {"stores": stores, "loads": loads}
        self.connector._connector_metadata = {n: [("r", 0, *one) for one in found] for n, found in named.items()}
        self.connector.start_load_kv()
        held = held or tuple(block for block, _ in loads) or (0,)
        self.copies.before_model(("r",), lambda: {"r": [set(held)]})
        self.connector.wait_for_save()

    def events(self) -> list[Any]:
        self.recorder.close()
        return [event for event in read_trace(self.path) if event.kind == "kv_copy"]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path / "t.arrow")


def column(event: Any, name: str) -> list[int]:
    return event.ints(f"copy_{name}").tolist()


def test_what_was_stored_is_known_when_it_is_loaded(played: Played) -> None:
    played.step(stores=[(2, "a"), (3, "b")])
    played.step(loads=[(5, "b")])
    store, load = played.events()
    assert (column(store, "src"), column(store, "dst"), column(store, "count")) == ([8, 12], [4, 8], [4, 4])
    assert column(store, "src_hash") == column(store, "dst_hash") and len(set(column(store, "src_hash"))) == 2
    assert (column(load, "src"), column(load, "dst"), load.scalar("request_id")) == ([8], [20], request_id_of("r"))
    assert column(load, "src_hash") == column(load, "dst_hash") == column(store, "src_hash")[1:]
    assert column(load, "before_hash") != column(load, "src_hash")
    assert played.copied[-1] == ([8, 9, 10, 11], [20, 21, 22, 23])


def test_the_key_stored_longest_ago_makes_room(played: Played) -> None:
    for block, key in ((2, "a"), (3, "b"), (4, "c")):  # two pages
        played.step(stores=[(block, key)])
    played.step(loads=[(5, "a")])
    *stores, load = played.events()
    assert [column(store, "dst") for store in stores] == [[4], [8], [4]]
    assert column(load, "count") == [0] and column(load, "src_hash") == column(load, "dst_hash")


def test_two_connectors_of_one_engine_have_pages_of_their_own(played: Played) -> None:
    played.step(stores=[(2, "a")])
    played.other._connector_metadata = {"stores": [("r", 0, 3, "a")]}
    played.other.wait_for_save()
    played.step(loads=[(5, "a")])
    mine, other, load = played.events()
    assert [column(event, "dst") for event in (mine, other)] == [[4], [8]]
    assert column(load, "src") == [4] and column(load, "src_hash") == column(mine, "dst_hash")


@pytest.mark.parametrize("held", [(), (6,)], ids=["where it was not asked to", "where its request has nothing"])
def test_a_load_that_lands_elsewhere(played: Played, held: tuple[int, ...]) -> None:
    played.step(stores=[(2, "a")])
    played.connector.lands = {} if held else {5: 6}
    played.step(loads=[(5, "a")], held=held)
    assert column(played.events()[-1], "landed") == [5 * SIZE if held else 6 * SIZE]


def test_what_another_load_is_to_bring_to_a_block_is_not_this_ones(played: Played) -> None:
    played.step(stores=[(2, "a")])
    played.connector.lands = {5: 6}
    loads = [("r", 0, 5, "a"), ("s", 0, 6, "a")]
    played.connector._connector_metadata = {"stores": [], "loads": loads}
    played.connector.start_load_kv()
    played.copies.before_model(("r", "s"), lambda: {"r": [{5}], "s": [{6}]})
    _, first, second = played.events()
    assert column(first, "dst_hash") == column(first, "before_hash") != column(first, "src_hash")
    assert (column(second, "src_hash"), column(first, "landed")) == (column(second, "dst_hash"), [-1])


def test_a_load_that_lands_late_and_one_that_fails(played: Played) -> None:
    played.step(stores=[(2, "a")])
    played.connector.lands = {5: 0}
    played.step(loads=[(5, "a")])
    played.step()
    played.connector.kv[5] = played.connector.kept["a"]
    played.step()
    played.connector.errors = {4}
    played.step(loads=[(4, "a")])
    _, load, late = played.events()
    assert column(load, "dst_hash") == column(load, "before_hash") != column(load, "src_hash")
    assert (late.scalar("note"), column(late, "dst"), column(late, "count")) == ("landed late", [20], [0])
    assert column(late, "dst_hash") == column(load, "src_hash")


def test_only_blocks_that_the_connector_was_asked_for_count_as_loaded(played: Played) -> None:
    # Blocks 4 to 6, of which 5 is asked for.
    counted = ExternalSlots(0, SIZE, np.arange(4 * SIZE, 7 * SIZE), own=True)
    played.step(stores=[(2, "a")])
    played.step(loads=[(5, "a")])
    played.copies.has_begun = False
    assert played.copies.asked_for(counted, is_over=False) is counted  # of this step it may be asked still
    asked = played.copies.asked_for(counted, is_over=True)
    assert (asked.start, asked.slots.tolist()) == (2 * SIZE, [20, 21, 22, 23])
    assert not played.copies.asked_for(counted, is_over=True).slots.size  # of another load nobody has spoken
    played.step(loads=[(3, "a")])
    assert played.copies.asked_for(counted, is_over=True) is counted  # what was asked for may be in the place of these
    assert played.copies.asked_for(counted._replace(slots=np.arange(12, 16)), is_over=True).slots.size == SIZE
    played.connector.broken = True
    played.step(stores=[(3, "a")])  # from here on nobody knows what it was asked
    assert played.copies.asked_for(counted, is_over=True) is counted


def test_blocks_of_which_a_load_changed_nothing_hold_what_they_held(played: Played) -> None:
    counted = ExternalSlots(0, SIZE, np.arange(4 * SIZE, 7 * SIZE), own=True)
    played.step(stores=[(2, "a"), (3, "b")])
    played.step(loads=[(4, "a"), (5, "nobody's"), (6, "b")])
    parts = played.copies.changed(counted)
    assert [(part.start, part.slots.tolist()) for part in parts] == [(4, [16, 17, 18, 19]), (12, [24, 25, 26, 27])]
    _, there, nowhere = played.events()
    assert column(there, "src_hash") == column(there, "dst_hash") and all(column(there, "src_hash"))
    assert column(nowhere, "src_hash") == [0] and column(nowhere, "dst_hash") == column(nowhere, "before_hash")


def test_a_hook_that_fails_ends_the_copies_alone(played: Played) -> None:
    played.step(stores=[(2, "a")])
    played.connector.broken = True
    played.step(stores=[(3, "a")])  # another content under that key, which nobody has recorded
    played.step(loads=[(5, "a")])
    assert played.faults == ["copies"]
    assert [event.scalar("note") for event in played.events()] == ["offload"]
