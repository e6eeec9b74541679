"""Launches made directly: the driver gets what Triton would have packed, and a kernel of another form is left to Triton."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
from kvcanary.kernels.capture import frame_driver
from kvcanary.kernels.capture.frame_driver import CudaDriver

STEP, FIXED = "2Q3i", "1Q2i"
PLACES = [(0, 8), (8, 8), (16, 4), (20, 4), (24, 4), (32, 8), (40, 4), (44, 4)]


def driver(places, launches, *, error=0, native=True):
    """A CUDA driver whose library notes what it is given."""

    def parameter(_function, index, offset, size):
        if index.value >= len(places):
            return 1
        offset._obj.value, size._obj.value = places[index.value]
        return 0

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def launch(config, function, params, extra):
        numbers = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))  # as cuda.h lays CUlaunchConfig out
        words = (ctypes.c_uint64 * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, 0)
        content = ctypes.string_at(words[1], ctypes.c_size_t.from_address(words[3]).value)
        launches.append((function, numbers, params, content))
        return error

    made = CudaDriver.__new__(CudaDriver)
    made._parameter, made._launch, made._native, made._known = parameter, launch, native, {}
    made.address = ctypes.cast(launch, ctypes.c_void_p).value
    return made


def compiled(**metadata):
    return SimpleNamespace(function=99, metadata=SimpleNamespace(num_warps=4, num_ctas=1, shared=64, **metadata))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_parameters_lie_where_the_kernel_wants_them(scratch, native):
    launches = []
    places = PLACES + [(48 + 8 * n, 8) for n in range(scratch)]
    made = driver(places, launches, native=native)
    launch = made.launch_of(compiled(), 33, step=STEP, fixed=FIXED, values=(1 << 40, 5, -6))
    for number, stream in ((1, 7), (2, 7), (3, 1 << 40)):
        launch.fill(number, 1 << 41, -1, number, 4)
        assert launch.fire(stream) == 0
    assert made._native == native
    packed = [struct.pack("<2Q3i4xQ2i", n, 1 << 41, -1, n, 4, 1 << 40, 5, -6) + bytes(8 * scratch) for n in (1, 2, 3)]
    configs = [(33, 1, 1, 128, 1, 1, 64, stream, 0, 0) for stream in (7, 7, 1 << 40)]
    assert launches == [(99, config, None, content) for config, content in zip(configs, packed, strict=True)]


def test_without_llvm_it_launches_by_ctypes(monkeypatch, caplog):
    def no_llvm(_):
        raise RuntimeError("no target for this machine")

    monkeypatch.setattr(frame_driver, "filler", no_llvm)
    launches = []
    made = driver(PLACES, launches)
    for number in (1, 2):
        launch = made.launch_of(compiled(), 1, step=STEP, fixed=FIXED, values=(1, 2, 3))
        launch.fill(number, 2, 3, 4, 5)
        assert launch.fire(8) == 0
    assert [struct.unpack_from("<Q", content)[0] for *_, content in launches] == [1, 2]
    assert len([entry for entry in caplog.records if "no target for this machine" in entry.message]) == 1


def test_a_kernel_is_asked_for_its_parameters_once():
    places = list(PLACES)
    made = driver(places, [])
    for _ in range(2):
        assert made.launch_of(compiled(), 1, step=STEP, fixed=FIXED, values=(1, 2, 3)) is not None
        places.clear()


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


def test_what_the_driver_refuses_is_told():
    launch = driver(PLACES, [], error=700).launch_of(compiled(), 1, step=STEP, fixed=FIXED, values=(1, 2, 3))
    launch.fill(1, 2, 3, 4, 5)
    assert launch.fire(7) == 700
