"""A kernel is looked up once for each form; later launches are handed addresses in the kernel's order."""

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.capture.frames import CarriedValues, FrameLayout, ModelInput
from kvcanary.kernels.capture.model_forward import Launches, ModelForward, TicketWriter


class Kernel:
    """Notes what it is launched with, by Triton's own way and by what that returned; in the interpreter returns nothing."""

    def __init__(self, *, interpreted=False):
        self.interpreted, self.compiled, self.launched = interpreted, [], []

    def warmup(self, *told, grid):
        self.compiled.append(told)
        return None if self.interpreted else {(*grid, 1, 1): lambda *again: self.launched.append(again)}

    def __getitem__(self, grid):
        return lambda *told: self.launched.append(told)


def test_each_form_is_compiled_once():
    kernel, launches = Kernel(), Launches()
    longs, ints = torch.arange(4), torch.arange(4, dtype=torch.int32)
    other = longs.clone()
    for tensors, constants in (
        ((longs,), (True,)),
        ((other,), (True,)),
        ((longs[1:],), (True,)),
        ((ints,), (True,)),
        ((longs,), (False,)),
        ((longs,), (True,)),
    ):
        launches.launch(kernel, 3, (*tensors, (16, *tensors)), constants)
    assert [told[-1] for told in kernel.compiled] == [True, True, False]
    assert [told[0].dtype for told in kernel.compiled] == [torch.int64, torch.int32, torch.int64]
    # A form is for all numbers and addresses, in tuples too: Triton asks for 1 and for multiples of 16.
    for pointer, (number, inner), _ in kernel.compiled:
        assert number != 1
        assert number % 16
        assert pointer.data_ptr() % 16
        assert inner.data_ptr() % 16
    places = [longs, other, longs[1:], ints, longs, longs]
    addresses = [place.data_ptr() for place in places]
    constants = [True, True, True, True, False, True]
    expected = zip(addresses, constants, strict=True)
    assert kernel.launched == [(address, (16, address), constant) for address, constant in expected]


def test_the_interpreter_is_asked_each_time():
    kernel, launches = Kernel(interpreted=True), Launches()
    for _ in range(2):
        assert launches.launch(kernel, 1, (torch.arange(2), 1)) is None
    assert len(kernel.launched) == 2


def test_later_tickets_say_what_the_first_would(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(model_forward, "write_ticket_kernel", kernel)
    frames, counters, descriptor, tickets = (torch.zeros(8, dtype=torch.int64) for _ in range(4))
    writer = TicketWriter(frames, counters, descriptor)
    layouts = [
        FrameLayout(bs=bs, tokens=bs, stream_words=(2,), table_capacity=3, lut_capacity=0, kv_capacity=5, tile=16)
        for bs in (1, 2)
    ]
    for number, layout in enumerate(layouts):
        ticket = tickets[number:]
        writer.write(ticket, ticket.data_ptr(), (number + 1, 10, 11, 12, 1), layout, 2048)
    memory = tuple(tensor.data_ptr() for tensor in (frames, counters, descriptor))
    nothing = (frames.data_ptr(),) * 2, (0,) * 4
    expected = [
        (tickets[number:].data_ptr(), memory, (number + 1, 10, 11, 12, 1, *layout.ticket, 2048), *nothing)
        for number, layout in enumerate(layouts)
    ]
    assert kernel.launched == expected
    given = torch.arange(3)
    addresses = given.data_ptr(), frames.data_ptr()
    carried = CarriedValues((given, frames), addresses, (5, 3, 0, 0))
    writer.write(ticket, ticket.data_ptr(), (2, 10, 11, 12, 1), layouts[1], 2048, carried)
    assert kernel.launched[-1] == (*expected[-1][:3], addresses, (5, 3, 0, 0))


@pytest.mark.parametrize("lens", ["by position", "extend", "draft extend"])
def test_lengths_that_are_not_there_are_addresses_all_the_same(monkeypatch, lens):
    kernel = Kernel()
    monkeypatch.setattr(model_forward, "begin_kernel", kernel)
    rows, prefix, extend, tokens = (torch.from_numpy(np.arange(2)) for _ in range(4))
    given = ModelInput(
        rows=rows,
        prefix=prefix,
        minus=extend if lens == "draft extend" else None,
        extend=None if lens == "by position" else extend,
        extend_each=1,
        input_ids=tokens,
        positions=tokens,
        out_cache_loc=tokens,
        num_tokens=2,
    )
    ticket = torch.zeros(1, dtype=torch.int64)
    ModelForward(ticket, given, None, lut_int64=True).begin()
    ((_, requests, of_tokens, own, numbers, *constants),) = kernel.launched
    minus, extended = given.minus is not None, given.extend is not None
    expected = (rows, prefix, extend if minus else rows, extend if extended else rows)
    assert requests == tuple(place.data_ptr() for place in expected)
    assert (*of_tokens, *own) == (tokens.data_ptr(),) * 5
    assert numbers == (2, 2, 1, 2, 2, 0)
    assert constants == [minus, extended, False, True, model_forward.TILE]
