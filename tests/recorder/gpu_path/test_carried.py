"""Integers that a forward's frame carries: no copy of their own, the same values in the same order."""

import weakref

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.device import recorder as device_recorder

from .two_recorders import Engine


class Said:
    """The engine, and what was recorded in which order: forwards by their numbers, integers by their names."""

    def __init__(self, folder, rng, monkeypatch, **more):
        self.engine = Engine(folder, rng, **more)
        self.device = self.engine.device
        self.device.capture.carries = True
        self.device.before_each(lambda forward: self.order.append(forward.number))
        self.order, self.copies = [], []
        copy = device_recorder.HostCopy
        monkeypatch.setattr(device_recorder, "HostCopy", lambda *args: self.copies.append(args) or copy(*args))

    def give(self, name, values, *, later=False):
        record = (
            self.device.later_with if later else lambda record, values: self.device.with_next_forward(record, values)
        )
        record(lambda found: self.order.append((name, found.tolist())), values)

    def forward(self):
        loc = [5, 6]
        self.engine.forward("decode", [1, 2], [0, 0], [1, 1], loc, [11, 12], [0, 0])


@pytest.fixture
def said(tmp_path, monkeypatch):
    return Said(tmp_path, np.random.default_rng(1), monkeypatch)


def test_a_frame_carries_what_was_given_out_before_it(said):
    for number in range(4):
        said.give("full", torch.arange(7, 9 + number % 2))
        if number % 2:
            said.give("window", torch.tensor([40 + number]))
        said.forward()
    _, events = said.engine.close()
    expected = []
    for number in range(4):
        window = [("window", [40 + number])] if number % 2 else []
        expected += [("full", list(range(7, 9 + number % 2))), *window, number]
    assert (said.order, said.copies) == (expected, [])
    assert [event["forward"] for event in events] == [0, 1, 2, 3]


def test_the_lengths_of_attention_beside_it_are_left_as_they_are(said):
    said.give("full", torch.full((4,), 99))
    said.forward()
    host, device = said.engine.close()
    assert host == device


def test_what_does_not_fit_or_cannot_wait_is_copied_by_itself(said):
    said.give("long", torch.arange(9))  # two tokens have room for four
    said.forward()
    for number in range(3):  # a frame carries two
        said.give(number, torch.tensor([number]))
    said.give("freed", torch.tensor([1]), later=True)  # the others come before it
    said.give("of bytes", torch.tensor([3], dtype=torch.int32))
    said.give("strided", torch.arange(4)[::2])
    said.forward()
    said.engine.close()
    long, *rest = said.order
    assert long == ("long", list(range(9)))
    assert rest == [
        *(0, (0, [0]), (1, [1]), (2, [2]), ("freed", [1])),
        *(("of bytes", [3]), ("strided", [0, 2]), 1),
    ]
    assert len(said.copies) == 7


def test_what_a_lost_forward_would_have_carried_comes_with_the_next(said, monkeypatch):
    capture = said.device.capture
    take = capture._buffer.take
    monkeypatch.setattr(type(capture._buffer), "take", lambda self, words: None)
    said.give("full", torch.tensor([7]))
    said.forward()
    monkeypatch.setattr(type(capture._buffer), "take", lambda self, words: take(words))
    said.forward()
    said.engine.close()
    assert said.order == [("full", [7]), 1]


def test_what_somebody_has_written_to_is_lost_and_said_so(said):
    given = torch.tensor([7, 8])
    said.give("full", given)
    given[0] = 9
    said.forward()
    said.give("full", torch.tensor([3]))
    said.forward()
    _, events = said.engine.close()
    notes = [event["note"] for event in events if event["kind"] == "loss"]
    assert "what the engine gave out was overwritten before it was recorded" in notes
    assert said.order == [("full", [3]), 1]
    assert len(said.copies) == 1  # nothing is carried any more


def test_what_somebody_has_written_to_is_lost_too_if_something_else_comes_behind_it(said):
    given = torch.tensor([7, 8])
    said.give("full", given)
    given[0] = 9
    said.give("freed", torch.tensor([1]), later=True)
    said.forward()
    _, events = said.engine.close()
    assert "what the engine gave out was overwritten before it was recorded" in [event["note"] for event in events]
    assert said.order == [("freed", [1]), 0]


def test_a_frame_in_flight_holds_no_memory_of_the_engines(said, monkeypatch):
    frames, deliver = [], said.device.capture.deliver
    monkeypatch.setattr(said.device.capture, "deliver", frames.append)
    given = torch.arange(1000)[:2]  # a view, as the allocator of single slots returns of all that are free
    held = weakref.ref(given)
    said.give("full", given)
    del given
    said.forward()
    assert len(frames) == 1
    assert held() is None
    deliver(frames[0])
    said.engine.close()
    assert said.order == [("full", [0, 1]), 0]


def test_memory_is_not_given_out_anew_before_the_stream_that_copies_it_has_come_there(said, monkeypatch):
    used = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda values, stream: used.append((values.tolist(), stream)))
    monkeypatch.setattr(said.device.capture, "_current_stream", lambda: "the forward's", raising=False)
    long = list(range(9))
    said.give("carried", torch.tensor([7]))
    said.forward()
    said.give("does not fit", torch.tensor(long))
    said.forward()
    said.give("cannot wait", torch.tensor([8]))
    said.give("freed", torch.tensor([1]), later=True)
    said.engine.close()
    assert used == [([7], "the forward's"), (long, "the forward's"), ([8], "the forward's")]
