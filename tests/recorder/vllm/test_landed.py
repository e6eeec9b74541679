"""Loads of a connector that is not known: what lies in the slots says whether they hold what was computed for the tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kvcanary.kernels.constants import UNKNOWN_TOKEN
from kvcanary.recorder.capture.privacy import IdentityValue
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.engines.common.requests import TokenList
from kvcanary.recorder.engines.vllm.connectors.copies import ConnectorCopies, ExternalSlots
from kvcanary.recorder.engines.vllm.connectors.ends import DeviceEnds
from kvcanary.recorder.engines.vllm.connectors.external import ExternalLoads
from kvcanary.recorder.engines.vllm.connectors.landed import LandedBlocks
from kvcanary.recorder.engines.vllm.connectors.landings import Keys, Told
from kvcanary.recorder.engines.vllm.connectors.storages import Member
from kvcanary.recorder.engines.vllm.step import VllmRequest
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace

from .groups import group

BLOCKS, SIZE = 8, 4
Kv = torch.Tensor


class Connector:
    """Its saves and loads are nobody's business; `failed` is what it says that it has not loaded."""

    failed: set[int] = set()  # noqa: RUF012

    def wait_for_save(self) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.failed


class Played:
    """One engine; on a device all that is recorded is recorded `late`: after each step, or when all is over."""

    def __init__(self, path: Path, late: str = "") -> None:
        self.path, self.connector, self.requests = path, Connector(), dict[str, VllmRequest]()
        self.kv = torch.zeros(2, BLOCKS, 2, SIZE, 8)
        own = replace(group(SIZE), num_blocks=BLOCKS, host_num_slots=40 * SIZE, layers=("a", "b"))
        pool = PoolGroup(name="full", num_slots=BLOCKS * SIZE, page_size=SIZE, host_num_slots=40 * SIZE)
        self.recorder = Recorder(path, TraceHeader(groups=(pool,), tables=(StateTable(rows=4, width=32),)))
        kept = SimpleNamespace(copied=lambda *_, **__: None)
        self.layout: Any = SimpleNamespace(groups=[own], kv=kept)
        layout = self.layout
        layers = {name: SimpleNamespace(kv_cache=kv) for name, kv in zip("ab", self.kv, strict=True)}
        self.landed = LandedBlocks(self.connector, layers, layout)
        copies = ConnectorCopies(self.landed, layout, self.recorder)
        self.late, self.queued = late, list[Any]()
        if late:
            internals: Any = copies
            internals._ends = DeviceEnds(cast("Any", self.landed), layout)
            internals._later = lambda *act: self.queued.append(act)
        self.faults: list[Exception] = []
        copies.attach(lambda _, error: self.faults.append(error))

    def step(self, name: str, tokens: list[int], block: int, *, prefix: int = 0, then: Any = None) -> None:
        """A forward of a request with one block, computing what lies behind its prefix; `then` happens in its midst."""
        if name not in self.requests:
            self.requests[name] = VllmRequest(name)
            self.requests[name].begin(tokens)
        written = np.arange(block * SIZE + prefix, block * SIZE + len(tokens)) if prefix < SIZE else np.array([28])
        step: Any = SimpleNamespace(
            names=(name,),
            prefix=np.array([prefix]),
            extend=np.array([len(tokens) - prefix]),
            tables=((torch.tensor([[block, 7]]), SIZE),),
            written=(written,),
        )
        self.landed.before_model(step, [self.requests[name]])
        if prefix < SIZE:
            self.kv[:, block] = torch.tensor(tokens[:SIZE], dtype=torch.float32)[:, None]
        if then is not None:
            then(self.kv)
        self.connector.wait_for_save()
        self.connector.get_block_ids_with_load_errors()
        if self.late == "a step":
            self.catch_up()

    def catch_up(self) -> None:
        """Do what is for the recorder's thread."""
        for act, *args in self.queued:
            act(*args)
        self.queued.clear()

    def load(self, name: str, tokens: list[int], block: int, *lands: Callable[[Kv], None]) -> None:
        """A load of one block for a request that is new; then steps of it, in whose midst the rest of `lands` happens."""
        loaded = ExternalSlots(0, 0, np.arange(block * SIZE, (block + 1) * SIZE), own=True)
        self.landed.allocated(name, loaded)
        lands[0](self.kv)
        self.landed.ended(name, loaded)
        for number in range(3):
            self.step(name, tokens, block, prefix=SIZE, then=(*lands, None, None, None)[number + 1])

    def events(self) -> list[tuple[str, int, int]]:
        """Return note, page and slots of what was recorded."""
        self.catch_up()
        assert not self.faults
        self.recorder.close()
        copies = [event for event in read_trace(self.path) if event.kind == "kv_copy"]
        for wrong in (event for event in copies if event.scalar("note") in ("not loaded", "changed")):
            assert wrong.ints("copy_src_hash").tolist() != wrong.ints("copy_dst_hash").tolist()
        ends = [("src", "dst")[event.scalar("note") == "seen"] for event in copies]
        return [
            (str(e.scalar("note")), int(e.ints(f"copy_{end}")[0]) // SIZE, int(e.ints("copy_count")[0]))
            for e, end in zip(copies, ends, strict=True)
        ]


def copy(src: int) -> Callable[[Kv], None]:
    """Return a load of what lies in another block."""

    def act(kv: Kv) -> None:
        kv[:, 5] = kv[:, src]

    return act


def nothing(_: Kv) -> None:
    pass


def other_order(kv: Kv) -> None:
    kv[:, 5] = kv[:, 1].flip(2)


def first_layer(kv: Kv) -> None:
    kv[0, 5] = kv[0, 1]


def of_another_engine(kv: Kv) -> None:
    kv[:, 5] = kv[:, 1] + 0.5


RIGHT, OTHER = ("load-back", 1, SIZE), ("load-back", 2, SIZE)
NOTHING, LATE = ("not loaded", 1, 0), ("landed late", 1, 0)


@pytest.mark.parametrize("late", ["", "a step", "all"])
@pytest.mark.parametrize(
    ("lands", "found"),
    [
        ([copy(1)], [RIGHT]),
        ([nothing, copy(1)], [RIGHT]),  # layer by layer
        ([copy(2)], [OTHER]),
        ([nothing], [NOTHING]),
        ([nothing, nothing, copy(1)], [NOTHING, LATE]),
        ([other_order], [NOTHING]),
        ([first_layer], [NOTHING]),
        ([first_layer, copy(1)], [RIGHT]),
        ([first_layer, nothing, copy(1)], [NOTHING, LATE]),
        ([of_another_engine], []),
        ([copy(1), of_another_engine], [RIGHT, ("changed", 1, 0)]),
    ],
    ids=[
        "right",
        "by layers",
        "other prefix",
        "nothing",
        "late",
        "other order",
        "one layer",
        "the others later",
        "the others too late",
        "another engine",
        "overwritten",
    ],
)
@pytest.mark.one_in(3)
def test_what_has_landed(
    tmp_path: Path, lands: list[Callable[[Kv], None]], found: list[tuple[str, int, int]], late: str
) -> None:
    played = Played(tmp_path / "t.arrow", late)
    played.step("one", [3, 4, 5, 6], 1)
    played.step("two", [7, 8, 9, 6], 2)
    played.load("three", [3, 4, 5, 6, 11], 5, *lands)
    assert played.events() == [("seen", 1, SIZE), ("seen", 2, SIZE), *found]


def forward(played: Played, name: str, tokens: list[int], prefix: int, blocks: list[int], slots: range) -> None:
    """A forward of a request with several blocks, which computes what goes to `slots`."""
    if name not in played.requests:
        played.requests[name] = VllmRequest(name)
        played.requests[name].begin(tokens)
    places = {"prefix": np.array([prefix]), "extend": np.array([len(slots)]), "written": (np.array(slots),)}
    step: Any = SimpleNamespace(names=(name,), tables=((torch.tensor([blocks]), SIZE),), **places)
    played.landed.before_model(step, [played.requests[name]])
    for place, slot in enumerate(slots, prefix):
        played.kv[:, slot // SIZE, :, slot % SIZE] = (*tokens, 6)[place]
    played.connector.wait_for_save()


def test_what_lies_behind_a_load_that_failed_is_computed_and_not_judged(tmp_path: Path) -> None:
    played, tokens = Played(tmp_path / "t.arrow"), list(range(3, 15))
    forward(played, "one", tokens, 0, [1, 2, 3], range(4, 16))
    loaded = ExternalSlots(0, 0, np.arange(16, 28), own=True)
    played.landed.allocated("two", loaded)
    played.connector.failed = {4}
    played.connector.get_block_ids_with_load_errors()
    played.landed.ended("two", loaded)
    for prefix in range(0, 12, SIZE):
        forward(played, "two", [*tokens, 99], prefix, [4, 5, 6, 7], range(16 + prefix, 20 + prefix))
    assert {note for note, *_ in played.events()} == {"seen"}


def test_a_block_that_was_filled_before_its_tokens_were_known_holds_no_others(tmp_path: Path) -> None:
    played = Played(tmp_path / "t.arrow")
    played.kv[:, 5] = torch.tensor([3.25, 4, 5, 0])[:, None]
    forward(played, "one", [3, 4, 5], 3, [5, 7], range(23, 24))
    played.step("two", [3, 4, 5, 6], 1)
    played.load("three", [3, 4, 5, 6, 11], 5, nothing)
    assert [note for note, *_ in played.events()].count("not loaded") == 0


def test_a_block_that_was_said_to_have_failed_is_unknown(tmp_path: Path) -> None:
    played = Played(tmp_path / "t.arrow")
    played.step("one", [3, 4, 5, 6], 1)
    played.load("two", [3, 4, 5, 6, 11], 5, nothing, lambda _: played.connector.__setattr__("failed", {5}))
    assert [note for note, *_ in played.events()] == ["seen"]


def test_blocks_that_the_scheduler_hears_have_failed_are_recorded(tmp_path: Path) -> None:
    played = Played(tmp_path / "t.arrow")
    requests: Any = played.requests
    external = ExternalLoads("NixlConnector", played.layout, requests, played.recorder, None, [])
    external.on_finished(SimpleNamespace(finished_recving=None, invalid_block_ids={0, 3, 6, BLOCKS}))
    played.recorder.close()
    failed = next(event for event in read_trace(played.path) if event.kind == "transfer")
    assert (failed.scalar("status"), failed.scalar("mode"), failed.scalar("peer")) == (
        "failed",
        "receive",
        "NixlConnector",
    )
    assert failed.ints("slot_start").tolist() == [3 * SIZE, 6 * SIZE]


def test_keys_go_on_where_they_ended_and_begin_anew_with_other_tokens() -> None:
    tokens, other = TokenList(), TokenList()
    tokens.begin([3, 4, 5, 6, 7])
    other.begin([3, 4, 5, 9, 7, 8, 2, 1])
    adapter = (IdentityValue("adapter", "sql"),)
    kept = Keys(Told("one", tokens.all(), tokens, ()), SIZE)
    kept.go_on(tokens.all())
    tokens.append([8, UNKNOWN_TOKEN, 1, 2, 3])
    kept.go_on(tokens.all())
    assert len(kept.found) == 1  # up to a token that nobody knows
    now = Told("one", tokens.all(), tokens, ())
    assert (
        kept.are_of(now) and not kept.are_of(now._replace(of=other)) and not kept.are_of(now._replace(depends=adapter))
    )
    made = [Keys(told, SIZE) for told in (now, now._replace(of=other), now._replace(depends=adapter))]
    for keys, of in zip(made, (tokens, other, tokens), strict=True):
        keys.go_on(of.all())
    assert made[0].found == kept.found
    assert len({keys.found[0][0] for keys in made}) == 3 and len({keys.found[0][1] for keys in made}) == 2
    assert len(made[1].found) == 2 and made[1].found[0] != made[1].found[1]


def test_two_connectors_of_one_class_are_both_recorded(tmp_path: Path) -> None:
    played = Played(tmp_path / "t.arrow")
    requests: Any = played.requests
    attached: list[int] = []
    storages: Any = [SimpleNamespace(attach=lambda _, n=n: attached.append(n)) for n in range(2)]
    members = [Member("HostConnector", storage, None) for storage in storages]
    external = ExternalLoads("MultiConnector", played.layout, requests, played.recorder, None, members)
    external.attach(lambda *_: None)
    played.recorder.close()
    assert attached == [0, 1]
