"""Machine code that fills a launch's parameters and calls the driver: as `struct` would pack them, and nothing but numbers."""

import ctypes
import gc
import random
import struct
import sys
import threading

import pytest
from kvcanary.kernels.capture.frame_calls import filler, launcher

PLACES = [(0, 8), (8, 8), (16, 4), (24, 4), (28, 4)]
FORM = "<2Qi4x2i"


def filling():
    memory = ctypes.create_string_buffer(b"\xaa" * 40, 40)
    return memory, filler(PLACES)(ctypes.addressof(memory))


@pytest.mark.parametrize("seed", range(5))
def test_numbers_lie_where_struct_packs_them(seed):
    rng = random.Random(seed)
    memory, fill = filling()
    other, fill_other = filling()
    for _ in range(50):
        numbers = [rng.choice([0, 1, rng.getrandbits(64)]) for _ in range(2)]
        numbers += [rng.choice([0, -1, 2**31 - 1, -(2**31), rng.randrange(-(2**31), 2**31)]) for _ in range(3)]
        assert fill(*numbers) is None
        packed = struct.pack(FORM, *numbers)
        assert memory.raw[:20] + memory.raw[24:] == packed[:20] + packed[24:] + b"\xaa" * 8
        assert memory.raw[20:24] == b"\xaa" * 4
    assert other.raw == b"\xaa" * 40, "each function has an address of its own"
    fill_other(1, 2, 3, 4, 5)
    assert struct.unpack(FORM, other.raw[:32]) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ((1, 2, 3, 4), SystemError),
        ((1, 2, 3, 4, 5, 6), SystemError),
        ((), SystemError),
        ((1, 2, 3, 4, 2**31), SystemError),
        ((1, 2, -(2**31) - 1, 4, 5), SystemError),
        ((1, 2, 3, 4, "5"), TypeError),
        ((None, 2, 3, 4, 5), TypeError),
    ],
)
def test_what_is_no_number_or_too_large_is_refused(numbers, error):
    memory, fill = filling()
    with pytest.raises(error):
        fill(*numbers)
    fill(1, 2, 3, 4, 5)
    assert struct.unpack(FORM, memory.raw[:32]) == (1, 2, 3, 4, 5)


def test_nothing_is_kept_of_what_is_given():
    """Reference counts stay, and the functions go away like others."""
    memory, fill = filling()
    number = 1 << 61
    before = sys.getrefcount(number)
    for _ in range(1000):
        fill(number, number, 1, 2, 3)
    assert struct.unpack(FORM, memory.raw[:32]) == (number, number, 1, 2, 3)
    assert sys.getrefcount(number) == before
    address = (1 << 62) + 5
    count = sys.getrefcount(address)
    functions = [filler(PLACES)(address) for _ in range(10)]
    assert sys.getrefcount(address) == count + 10
    functions.clear()
    gc.collect()
    assert sys.getrefcount(address) == count


def test_a_launch_gets_its_four_words_and_the_stream():
    given, errors = [], [0, 700, -1]

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def launch(config, *rest):
        given.append((ctypes.c_uint64.from_address(config + 32).value, *rest))
        return errors[len(given) - 1]

    config = ctypes.create_string_buffer(56)
    words = (ctypes.c_void_p * 4)(ctypes.addressof(config), 99, None, 55)
    fire = launcher(ctypes.cast(launch, ctypes.c_void_p).value or 0)(ctypes.addressof(words))
    assert [fire(stream) for stream in (7, 1 << 47, 0)] == errors
    assert given == [(stream, 99, None, 55) for stream in (7, 1 << 47, 0)]
    for wrong, error in (((), SystemError), ((1, 2), SystemError), (("7",), TypeError)):
        with pytest.raises(error):
            fire(*wrong)
    assert len(given) == 3


def test_threads_may_make_them_at_once():
    made = []

    def make():
        memory, fill = filling()
        fill(1, 2, 3, 4, 5)
        made.append(struct.unpack(FORM, memory.raw[:32]))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [(1, 2, 3, 4, 5)] * 4
