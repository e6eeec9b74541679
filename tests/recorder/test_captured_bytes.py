"""Every byte that is captured is checked: a flip anywhere in it is found, whichever executor and backend replays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.documented_engine import printed_code, run_code, run_requests

SLOTS = 24


def captured_engine(path: Path, capture: int, **options: Any) -> Any:
    """Return the guide's engine, which captures so many of the 32 bytes of a token's K and V."""
    code = printed_code().replace("_bytes=16", f"_bytes={capture}").split("\nengine = ToyEngine")[0]
    assert code.count(f"_bytes={capture}") == 2
    names = run_code(code)
    recorder = names["Recorder"]
    names["Recorder"] = lambda *args, **kwargs: recorder(*args, **kwargs, **options)
    return names["ToyEngine"](lambda engine: names["start_recorder"](engine, path))


def run_with_flip(path: Path, capture: int, byte: int, **options: Any) -> int:
    """Flip one byte of a slot that the next forward reads, between two forwards; return the slot."""
    engine = captured_engine(path, capture, **options)
    flipped = []

    def before_step(step: int) -> None:
        if step == 6:
            row, request = next(iter(engine.requests.items()))
            flipped.append(int(engine.req_to_token[row, request[2] - 1]))
            engine.pool["K"].view("uint8")[flipped[0], byte] ^= 0x20

    run_requests(engine, before_step)
    engine.recorder.close()
    return flipped[0]


EXECUTORS = [{"executor": "interval"}, {"executor": "stepwise"}, {"executor": "stepwise", "backend": "reference"}]


@pytest.mark.parametrize("settings", EXECUTORS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize(("capture", "byte"), [(32, 0), (32, 20), (32, 31), (16, 15)])
def test_a_flip_of_any_captured_byte_is_found_by_default(
    capture: int, byte: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    slot = run_with_flip(tmp_path / "trace.arrow", capture, byte)
    summary = replay(tmp_path / "trace.arrow", settings=ReplaySettings(**settings), report=None)
    assert (summary.first_violation["forward"], summary.first_violation["slot"]) == (6, slot)
    assert set(summary.violations_by_launch) == {"TAIL_K_FULL"}


def test_the_published_canarys_partial_hash_is_still_to_be_had(tmp_path: Path) -> None:
    run_with_flip(tmp_path / "trace.arrow", 32, 20)
    partial = replay(tmp_path / "trace.arrow", settings=ReplaySettings(kv_hash="partial"), report=None)
    assert (partial.violations, partial.settings["kv_hash"]) == (0, "partial")
    whole = replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=None)
    assert whole.settings["kv_hash"] == "all"


def test_a_byte_behind_the_captured_ones_is_not_watched(tmp_path: Path) -> None:
    run_with_flip(tmp_path / "trace.arrow", 16, 16)
    assert replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=None).violations == 0


class Damaged:
    """An engine with three rows, in which one byte of one slot is flipped at one moment; it knows who read it since.

    `watched` and `unwatched` are the forwards that read the damaged byte, by whether the recorder looked at them.
    """

    def __init__(self, path: Path, *, capture: int, every: int, padding: tuple[int, ...]) -> None:
        self.pool = [np.zeros((SLOTS, 64), np.uint8) for _ in "KV"]
        self.table = np.zeros((4, 32), np.int32)
        self.free = [slot for slot in range(SLOTS) if slot not in padding]
        self.lens = {1: 0, 2: 0, 3: 0}
        self.forwards, self.every = 0, every
        self.damaged = (-1, -1, -1)  # half, slot, byte
        self.watched: list[int] = []
        self.written_wrong: list[int] = []
        streams = tuple(KvStream(half=half, bytes_per_token=64, capture_bytes=capture) for half in "KV")
        group = PoolGroup(name="full", num_slots=SLOTS, streams=streams, padding_slots=padding)
        header = TraceHeader(groups=(group,), tables=(StateTable(rows=4, width=32),))
        sources = {
            (0, n): KvSource(tensor=pool, page_size=1, bytes_per_token=64, read_bytes=capture)
            for n, pool in enumerate(self.pool)
        }
        self.capture = capture
        self.recorder = Recorder(path, header, kv_sources=sources, kv_watch_every=every)
        self.random = np.random.default_rng(11)

    def drop(self, row: int) -> None:
        self.free += self.table[row, : self.lens[row]].tolist()
        self.lens[row] = 0

    def forward(self, row: int, count: int, flip: tuple[int, int, int] | None) -> None:
        """`flip` is half, byte, and which of the tokens just handed in is damaged before the forward ends."""
        prefix = self.lens[row]
        slots = [self.free.pop(0) for _ in range(count)]
        positions = np.arange(prefix, prefix + count)
        read = self.table[row, :prefix].tolist()
        self.recorder.before_forward(
            ForwardInput(
                mode="extend",
                req_pool_indices=[row],
                request_ids=[row],
                prefix_lens=[prefix],
                extend_lens=[count],
                input_ids=positions + 3,
                positions=positions,
                out_cache_loc=(slots,),
                reads=(self.table,),
            )
        )
        self.table[row, positions] = slots
        given = [self.random.integers(0, 256, (count, 64), np.uint8) for _ in "KV"]
        for pool, rows in zip(self.pool, given, strict=True):
            pool[slots] = rows
        half, slot, byte = self.damaged
        if slot in slots:
            self.damaged = (-1, -1, -1)
        elif slot in read and byte < self.capture and self.forwards % self.every == 0:
            self.watched.append(self.forwards)
        if flip is not None:
            half, byte, token = flip
            self.pool[half][slots[token % count], byte] ^= 64
            if byte < self.capture:
                self.written_wrong.append(self.forwards)
        self.recorder.after_forward(submitted={(0, n): rows for n, rows in enumerate(given)})
        self.lens[row] += count
        self.forwards += 1


STEPS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()), min_size=4, max_size=14)


@settings(
    max_examples=settings().max_examples // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=STEPS,
    moment=st.integers(0, 13),
    within=st.booleans(),
    half=st.integers(0, 1),
    byte=st.integers(0, 63),
    which=st.integers(0, 40),
    capture=st.sampled_from([16, 32, 64]),
    every=st.sampled_from([1, 1, 2, 3]),
    padding=st.sampled_from([(0,), (), (5,)]),
)
def test_a_flip_at_any_moment_is_found_or_lies_where_the_trace_does_not_look(
    steps: list[tuple[int, int, bool]],
    moment: int,
    within: bool,
    half: int,
    byte: int,
    which: int,
    capture: int,
    every: int,
    padding: tuple[int, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    engine = Damaged(folder / "trace.arrow", capture=capture, every=every, padding=padding)
    for number, (row, count, dropped) in enumerate(steps):
        if dropped:
            engine.drop(row)
        held = [slot for r, length in engine.lens.items() for slot in engine.table[r, :length].tolist()]
        flip = (half, byte, which) if within and number == moment else None
        if not within and number == moment and held:
            engine.damaged = (half, held[which % len(held)], byte)
            engine.pool[half][engine.damaged[1], byte] ^= 64
        if len(engine.free) >= count and engine.lens[row] + count < 32:
            engine.forward(row, count, flip)
    engine.recorder.close()
    summary = replay(folder / "trace.arrow", settings=ReplaySettings(), report=None)
    assert not summary.losses
    assert bool(summary.violations) == bool(engine.watched)
    if engine.watched:
        assert summary.first_violation["forward"] == engine.watched[0]
    assert dict(summary.findings_by_kind) == ({"write_damaged": 1} if engine.written_wrong else {})
