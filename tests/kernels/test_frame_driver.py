"""Launches made directly: the driver gets what Triton would have packed, and a kernel of another form is left to Triton."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
from kvcanary.kernels.gpu.frame_driver import CudaDriver

STEP, FIXED = "2Q3i", "1Q2i"
PLACES = [(0, 8), (8, 8), (16, 4), (20, 4), (24, 4), (32, 8), (40, 4), (44, 4)]


def driver(places, launches, *, streams=lambda: 7, error=0):
    """A CUDA driver whose library notes what it is given."""

    def parameter(_function, index, offset, size):
        if index.value >= len(places):
            return 1
        offset._obj.value, size._obj.value = places[index.value]
        return 0

    def launch(function, *rest):
        *shape, stream, params, extra = rest
        length = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_size_t))[0]
        launches.append((function.value, shape, stream.value, params, ctypes.string_at(extra[1], length)))
        assert (extra[0], extra[2], extra[4]) == (1, 2, None)
        return error

    made = CudaDriver.__new__(CudaDriver)
    made._parameter, made._launch = parameter, launch
    made._current_stream, made._device = lambda device: streams(), 0
    return made


def compiled(**metadata):
    return SimpleNamespace(function=99, metadata=SimpleNamespace(num_warps=4, num_ctas=1, shared=64, **metadata))


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_parameters_lie_where_the_kernel_wants_them(scratch):
    launches, streams = [], [7, 7, 8]
    places = PLACES + [(48 + 8 * n, 8) for n in range(scratch)]
    made = driver(places, launches, streams=lambda: streams.pop(0))
    launch = made.launch_of(compiled(), 33, step=STEP, fixed=FIXED, values=(1 << 40, 5, -6))
    for number in (1, 2, 3):
        launch(number, 1 << 41, -1, number, 4)
    packed = [struct.pack("<2Q3i4xQ2i", n, 1 << 41, -1, n, 4, 1 << 40, 5, -6) + bytes(8 * scratch) for n in (1, 2, 3)]
    shape = [33, 1, 1, 128, 1, 1, 64]
    assert launches == [(99, shape, stream, None, content) for stream, content in zip((7, 7, 8), packed, strict=True)]


@pytest.mark.parametrize(
    "places",
    [PLACES[:-1], [*PLACES[:2], (16, 8), *PLACES[3:]], [*PLACES, (48, 4)], [*PLACES, (48, 8), (56, 8), (64, 8)]],
    ids=["fewer", "a longer number", "one more number", "too many addresses"],
)
def test_a_kernel_with_other_parameters_is_left_to_triton(places):
    assert driver(places, []).launch_of(compiled(), 1, step=STEP, fixed=FIXED, values=(1, 2, 3)) is None


def test_a_kernel_that_wants_more_than_a_launch_is_left_to_triton():
    for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"):
        kernel = compiled(**{name: 1})
        assert driver(PLACES, []).launch_of(kernel, 1, step=STEP, fixed=FIXED, values=(1, 2, 3)) is None
    strange = SimpleNamespace(function=object(), metadata=compiled().metadata)
    assert driver(PLACES, []).launch_of(strange, 1, step=STEP, fixed=FIXED, values=(1, 2, 3)) is None


def test_what_the_driver_refuses_is_raised():
    launch = driver(PLACES, [], error=700).launch_of(compiled(), 1, step=STEP, fixed=FIXED, values=(1, 2, 3))
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        launch(1, 2, 3, 4, 5)
