"""Forwards told by one call of machine code: every launch and every flight is as on the long way, and so is what is not."""

import ctypes
import functools
import struct
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import frame_again, frame_launch
from kvcanary.kernels.capture.frame_driver import CudaDriver
from kvcanary.recorder.capture.device import capture as capturing
from kvcanary.recorder.capture.device.forward import BatchRequests, Lens

from .two_recorders import Engine

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no exchange of tensors by C functions",
)

REQUESTS = BatchRequests(ids=np.array([7, 8]))
DOWN, BACK = "7Q6i3Q8i", "4i3Q8i"  # what the kernels take, as `struct` lays it out
STEP = {DOWN: "<7Q6i", BACK: "<4i"}


class FakeDriver(CudaDriver):
    """Launches nothing, and notes the parameters that change from launch to launch."""

    def __init__(self, launches):
        self.error = 0
        self._native, self._known = True, {}

        def parameter(function, index, offset, size):
            places = frame_launch_places(BOTH[function.value])
            if index.value >= len(places):
                return 1
            offset._obj.value, size._obj.value = places[index.value]
            return 0

        @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        def launch(config, function, _params, extra):
            words = (ctypes.c_uint64 * 5).from_address(extra)
            step = STEP[BOTH[function]]
            stream = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))[7]
            launches.append((function, stream, struct.unpack(step, ctypes.string_at(words[1], struct.calcsize(step)))))
            return self.error

        self._parameter, self._launch = parameter, launch
        self.address = ctypes.cast(launch, ctypes.c_void_p).value


BOTH = {1: DOWN, 2: BACK}


@functools.cache
def frame_launch_places(layout):
    from kvcanary.kernels.capture.frame_driver import _places

    return _places(layout)


class FakeKernel:
    def __init__(self, function, launches):
        self.function, self.launches = function, launches

    def __getitem__(self, _):
        def launch(*told):
            step = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in told]
            self.launches.append((self.function, 0, tuple(step[: 13 if self.function == 1 else 4])))
            return SimpleNamespace(function=self.function, metadata=SimpleNamespace(num_warps=4, num_ctas=1, shared=0))

        return launch


class Side:
    """A capture whose launches are noted; `again` is asked first where `repeats`."""

    def __init__(self, folder, monkeypatch, *, repeats, watch_every=1, frame_bytes=1 << 20):
        folder.mkdir()
        self.engine = Engine(folder, np.random.default_rng(1), watch_every=watch_every, frame_bytes=frame_bytes)
        self.capture = self.engine.device.capture
        self.launches, self.flights, self.repeated, self.repeats = [], [], 0, repeats
        self.driver = FakeDriver(self.launches)
        for kernels in self.capture._kernels:
            kernels._driver, kernels._compiled = self.driver, {}
        self.capture.deliver = self.flights.append
        self.kernels = FakeKernel(1, self.launches), FakeKernel(2, self.launches)
        if repeats:
            self.capture.repeat(self.driver, torch.device("cpu"))
            assert self.capture._repeating._repeater is not None

    def forward(self, monkeypatch, mode, tensors, lens=None, *, runner=0):
        monkeypatch.setattr(frame_launch, "take_down_kernel", self.kernels[0])
        monkeypatch.setattr(frame_launch, "take_back_kernel", self.kernels[1])
        rows, ids, positions, loc = tensors
        number = -1
        last = self.capture._again_of
        if self.repeats and lens is None and last is not None and last[:2] == (mode, runner):
            number = self.capture.again(rows, ids, positions, loc, REQUESTS, [1, 1])
        self.repeated += number >= 0
        if number < 0:
            tokens = min(ids.numel(), positions.numel())
            number = self.capture.before(
                mode, runner, rows.numel(), rows, ids, positions, loc, tokens, lens, REQUESTS, [1, 1]
            )
        self.capture.ended(None, None)
        return number

    def close(self):
        self.capture.off = True
        self.engine.close()


def both(folder, monkeypatch, **options):
    return [Side(folder / name, monkeypatch, repeats=name == "again", **options) for name in ("again", "long")]


def told(flights):
    return [flight._replace(launched_ns=0, layout=flight.layout.words) for flight in flights]


def tensors(bs, dtypes=(torch.int64,) * 4, more=0):
    return [torch.arange(1, 1 + bs + more * (n == 3)).to(dtypes[n]) for n in range(4)]


@pytest.mark.parametrize("watch_every", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_is_told_as_on_the_long_way(tmp_path, monkeypatch, watch_every, seed):
    rng = np.random.default_rng([seed, watch_every])
    sides = both(tmp_path, monkeypatch, watch_every=watch_every)
    for side in sides:  # near the ends of what counts on
        side.capture.ledger.number, side.capture.ledger.taken = 2**31 - 100, 1000
        side.capture.ledger.given_back = 1000
    kinds = [
        tensors(2),
        tensors(3),
        tensors(3, (torch.int64, torch.int32, torch.int64, torch.int64)),
        tensors(2, more=2),
    ]
    kind = kinds[0]
    for _ in range(400):
        chance = rng.random()
        if chance < 0.1:
            kind = kinds[rng.integers(len(kinds))]
        given = [tensor.clone() for tensor in kind]
        if 0.1 < chance < 0.13:
            spread = given[2].repeat_interleave(2)[::2]  # the long way would have it made contiguous first
            assert sides[0].capture.again(given[0], given[1], spread, given[3], REQUESTS, [1, 1]) == -1
        elif chance < 0.16:
            [side.capture.reset() for side in sides]
        elif chance < 0.22:
            still = bool(rng.random() < 0.2)
            [side.capture.catch_up(still=still) for side in sides]
        elif chance < 0.3:
            for side in sides:
                while side.capture.ledger.given_back < side.capture.ledger.taken:
                    side.capture.release(side.flights[side.capture.ledger.given_back - 1000])
        lens = Lens(given[2], None, given[1][: len(given[0])], 1) if chance > 0.95 else None
        mode = "decode" if chance < 0.9 else "idle"
        numbers = [side.forward(monkeypatch, mode, given, lens) for side in sides]
        assert numbers[0] == numbers[1]
    again, long = sides
    assert told(again.flights) == told(long.flights)
    assert again.launches == long.launches
    assert again.repeated > 20
    assert {flight.watched for flight in again.flights} == {watch_every == 1, watch_every > 0}
    for side in sides:
        side.close()


def test_a_full_arena_and_too_many_flights_are_lost_on_the_long_way(tmp_path, monkeypatch):
    sides = both(tmp_path, monkeypatch, frame_bytes=1 << 16)
    given = tensors(2)
    for side in sides:
        lost = []
        side.capture.on_no_room = functools.partial(lost.append, 1)
        numbers = [side.forward(monkeypatch, "decode", given) for _ in range(60)]
        assert numbers == list(range(60))
        assert lost
        side.lost = len(lost)
    assert sides[0].lost == sides[1].lost
    assert told(sides[0].flights) == told(sides[1].flights)
    assert sides[0].repeated > 3
    for side in sides:
        side.close()


def test_no_more_fly_than_there_are_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(capturing, "MAX_FLIGHTS", 10)
    side = Side(tmp_path / "one", monkeypatch, repeats=True, frame_bytes=64 << 20)
    for _ in range(20):
        side.forward(monkeypatch, "decode", tensors(2))
    assert len(side.flights) == 10
    assert side.repeated > 5
    side.close()


def test_what_is_not_as_it_was_is_left_alone(tmp_path, monkeypatch):
    side = Side(tmp_path / "one", monkeypatch, repeats=True)
    given = tensors(2)
    while not side.repeated:
        side.forward(monkeypatch, "decode", given)
    rows, ids, positions, loc = given
    before = bytes(side.capture.ledger), len(side.launches)
    take = side.capture._again
    column = torch.arange(6).reshape(2, 3)[:, 0]
    for other in (None, 5, [1, 2], np.arange(2), torch.zeros(2), torch.zeros(2, 1).long(), torch.arange(3), column):
        for place in range(4):
            told = [rows, ids, positions, loc]
            told[place] = other
            assert take(*told) is None, (place, other)
    found = []
    thread = threading.Thread(target=lambda: found.append(take(*given)))
    thread.start()
    thread.join()
    assert found == [None], "another thread has another stream"
    for word in ("off", "reset", "catching_up"):
        setattr(side.capture.ledger, word, 1)
        assert take(*given) is None
        setattr(side.capture.ledger, word, 0)
    with pytest.raises(SystemError):
        take(rows)
    assert (bytes(side.capture.ledger), len(side.launches)) == before
    assert side.capture.again(*given, REQUESTS, [1, 1]) >= 0
    assert side.capture.again(*given, REQUESTS, [1, 1]) == -1, "one has not ended yet"
    side.capture.off = True
    assert side.capture._end() is None
    side.engine.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_driver_refuses_is_raised(tmp_path, monkeypatch, when):
    side = Side(tmp_path / "one", monkeypatch, repeats=True)
    given = tensors(2)
    while not side.repeated:
        side.forward(monkeypatch, "decode", given)
    if when == "before":
        side.driver.error = 700
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            side.capture.again(*given, REQUESTS, [1, 1])
    else:
        side.capture.again(*given, REQUESTS, [1, 1])
        side.driver.error = 701
        with pytest.raises(RuntimeError, match="CUDA error 701"):
            side.capture.ended(None, None)
    side.close()


def test_a_model_that_raises_is_noted(tmp_path, monkeypatch):
    side = Side(tmp_path / "one", monkeypatch, repeats=True)
    given = tensors(2)
    while not side.repeated:
        side.forward(monkeypatch, "decode", given)
    side.capture.again(*given, REQUESTS, [1, 1])
    side.capture.ended(None, KeyError("x"))
    assert side.flights[-1].note == "the model raised KeyError: 'x'"
    assert len(side.launches) == 2 * len(side.flights)
    side.close()


@pytest.mark.parametrize("error", [AttributeError("no exchange"), ImportError("no llvmlite"), ValueError("version 2")])
def test_without_the_exchange_all_go_the_long_way(tmp_path, monkeypatch, caplog, error):
    def fails():
        raise error

    monkeypatch.setattr(frame_again, "TensorExchange", fails)
    caplog.set_level("INFO", "kvcanary")
    side = Side(tmp_path / "one", monkeypatch, repeats=False)
    side.capture.repeat(side.driver, torch.device("cpu"))
    assert str(error) in caplog.text
    for _ in range(4):
        side.forward(monkeypatch, "decode", tensors(2))
    assert side.capture._again is None
    side.close()


def test_code_that_llvm_does_not_make_is_missed_before_any_forward(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("LLVM ERROR")

    monkeypatch.setattr(frame_again, "_again", fails)
    caplog.set_level("INFO", "kvcanary")
    side = Side(tmp_path / "one", monkeypatch, repeats=False)
    side.capture.repeat(side.driver, torch.device("cpu"))
    assert "LLVM ERROR" in caplog.text
    for _ in range(4):
        side.forward(monkeypatch, "decode", tensors(2))
    assert len(side.flights) == 4
    side.close()


def test_tensors_that_the_exchange_cannot_read_go_the_long_way(tmp_path, monkeypatch):
    def fails(_):
        raise RuntimeError("Cannot access data pointer of Tensor")

    side = Side(tmp_path / "one", monkeypatch, repeats=True)
    monkeypatch.setattr(side.capture._repeating._repeater._exchange, "look", fails)
    for _ in range(4):
        side.forward(monkeypatch, "decode", tensors(2))
    assert (len(side.flights), side.repeated) == (4, 0)
    side.close()


def test_what_is_switched_off_before_its_end_is_launched_is_not_delivered(tmp_path, monkeypatch):
    side = Side(tmp_path / "one", monkeypatch, repeats=True)
    while not side.repeated:
        side.forward(monkeypatch, "decode", tensors(2))
    side.capture.again(*tensors(2), REQUESTS, [1, 1])
    delivered, launched, end = len(side.flights), len(side.launches), side.capture._end

    def switched_off():
        side.capture.off = True  # by another thread
        return end()

    monkeypatch.setattr(side.capture, "_end", switched_off)
    side.capture.after("")
    assert (len(side.flights), len(side.launches)) == (delivered, launched), "it would be waited for and never land"
    side.close()
