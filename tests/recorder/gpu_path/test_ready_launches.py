"""Launches that are ready are handed what the first ones were: addresses in the kernels' order, places and stamps."""

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture.frame_driver import Launch
from kvcanary.kernels.capture.frame_launch import FrameKernels
from kvcanary.recorder.capture.device.forward import BatchRequests, Lens

from .two_recorders import Engine

REQUESTS = BatchRequests(ids=np.array([7, 8]))


class Launches:
    """Stands for the kernels: launches nothing, and keeps what each launch is handed, first or ready."""

    def __init__(self, monkeypatch, error=0):
        self.down, self.back, self.fired = [], [], []
        self.error = error
        monkeypatch.setattr(FrameKernels, "take_down", self.take_down)
        monkeypatch.setattr(FrameKernels, "take_back", self.take_back)

    def launch(self, told):
        def fire(stream):
            self.fired.append((id(told), stream))
            return self.error

        return Launch(fill=lambda *numbers: told.append(numbers), fire=fire)

    def take_down(self, layout, rows, prefix, minus, extend, each, ids, positions, loc, *numbers):
        addressed = (rows, prefix, rows if minus is None else minus, rows if extend is None else extend)
        addresses = [tensor.data_ptr() for tensor in (*addressed, ids, positions, loc)]
        self.down.append((*addresses, *numbers, loc.numel(), prefix.numel(), each))
        return self.launch(self.down)

    def take_back(self, layout, at, flight, following, forward, watch):
        self.back.append((at, flight, following, forward))
        return self.launch(self.back)


def ints(*values):
    return torch.tensor(values)


TENSORS = (ints(1, 2), ints(5, 6), ints(9, 4), ints(20, 21))  # rows, input_ids, positions, out_cache_loc
LENS = {
    "by position": None,
    "verify": Lens(ints(3, 4), None, None, 1),
    "extend": Lens(ints(3, 4), None, ints(1, 1), 1),
    "draft extend": Lens(ints(3, 4), ints(1, 1), ints(1, 1), 1),
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_the_second_launch_is_handed_what_the_first_was(tmp_path, monkeypatch, lens):
    engine = Engine(tmp_path, np.random.default_rng(1), watch_every=2)
    launches = Launches(monkeypatch)
    capture = engine.device.capture
    capture.deliver = lambda flight: delivered.append(flight)
    capture._stream = lambda: 77
    capture.ledger.reset = capture.ledger.catching_up = 0
    delivered = []
    for _ in range(6):
        capture.before("decode", 0, 2, *TENSORS, 2, lens, REQUESTS, [1, 1])
        capture.after("")
    assert [flight.watched for flight in delivered] == [True, False] * 3
    assert [len(launches.down), len(launches.back)] == [6, 6]
    first, *rest = launches.down
    places = [flight.at for flight in delivered]
    assert len(set(places)) == 6
    for number, told in enumerate(rest, 1):
        assert (told[:7], told[10:]) == (first[:7], first[10:])
        assert told[7:10] == (places[number], number, number + 1)
    assert launches.back == [(at, number, number + 1, number + 1) for number, at in enumerate(places)]
    # The first of a size are launched as they are made; of taking back, with and without a look at the prefix.
    assert [launch for launch, _ in launches.fired].count(id(launches.down)) == 5
    assert [launch for launch, _ in launches.fired].count(id(launches.back)) == 4
    assert {stream for _, stream in launches.fired} == {77}
    capture.off = True
    engine.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launch_that_the_driver_refuses_switches_it_off(tmp_path, monkeypatch, when):
    engine = Engine(tmp_path, np.random.default_rng(1))
    launches = Launches(monkeypatch)
    engine.device.capture.deliver = lambda _: None
    for error in (0, 700):
        launches.error = error if when == "before" else 0
        engine.forward(
            "decode",
            [1, 2],
            [3, 4],
            [1, 1],
            [5, 6],
            [7, 8],
            [3, 4],
            during=lambda e=error: setattr(launches, "error", e),
        )
    assert engine.device.capture.off
    engine.host.close()
    engine.device.close()
    assert f"{when}_forward: RuntimeError: cuLaunchKernelEx: CUDA error 700" in engine.device.stats().off
