"""The CUDA driver's launch, called directly: what Triton does around it takes longer than the launch itself.

The driver is opened so that Python's lock is kept during a call. A launch takes two microseconds; whoever gives the
lock away for it may find it taken, and waits for another thread.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

# What Triton appends to a kernel's parameters, by version: addresses of scratch memory, of which these kernels use none.
MAX_SCRATCH_ADDRESSES: Final = 2
_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*

Launch = Callable[..., None]


class CudaDriver:
    """Launches compiled Triton kernels on the engine's current stream; for the engine's thread.

    Args:
        current_stream: gives the address of the stream that is current on the engine's thread, of a device.
        device: its index.

    Raises:
        OSError: there is no driver.
        AttributeError: it is older than CUDA 12.4, and does not tell a kernel's parameters.
    """

    def __init__(self, current_stream: Callable[[int], int], device: int) -> None:
        driver = ctypes.PyDLL("libcuda.so.1")
        self._launch = driver.cuLaunchKernel
        self._parameter = driver.cuFuncGetParamInfo
        self._current_stream = current_stream
        self._device = device

    def launch_of(self, compiled: Any, programs: int, *, step: str, fixed: str, values: Sequence[int]) -> Launch | None:
        """Return what launches a kernel with the numbers of `step`; None where it takes other parameters than these.

        Args:
            compiled: what Triton returned from a launch.
            programs: how many.
            step: the parameters that change from launch to launch, as of `struct`: `Q` an address, `i` a number.
            fixed: those that follow them and stay.
            values: of the fixed ones.
        """
        function = getattr(compiled, "function", None)
        metadata = getattr(compiled, "metadata", None)
        if not isinstance(function, int) or metadata is None or _needs_more(metadata):
            return None
        handle = ctypes.c_void_p(function)
        found = self._parameters(handle)
        expected = _places(step + fixed)
        scratch = found[len(expected) :]
        if found[: len(expected)] != expected or [n for _, n in scratch] != [8] * len(scratch):
            return None
        if len(scratch) > MAX_SCRATCH_ADDRESSES:
            return None
        size = found[-1][0] + found[-1][1]
        buffer = ctypes.create_string_buffer(size)  # zeros, so no scratch memory
        struct.pack_into(fixed, buffer, expected[len(_sorts(step))][0], *values)
        length = ctypes.c_size_t(size)
        extra = (ctypes.c_void_p * 5)(_BUFFER, ctypes.addressof(buffer), _SIZE, ctypes.addressof(length), _END)
        threads, shared = 32 * int(metadata.num_warps), int(metadata.shared)
        pack, cu_launch, current, device = (
            struct.Struct(step).pack_into,
            self._launch,
            self._current_stream,
            self._device,
        )
        stream, address, kept = ctypes.c_void_p(), 0, length

        def launch(*numbers: int) -> None:
            nonlocal stream, address
            pack(buffer, 0, *numbers)
            now = current(device)
            if now != address:
                stream, address = ctypes.c_void_p(now), now
            error = cu_launch(handle, programs, 1, 1, threads, 1, 1, shared, stream, None, extra)
            if error:
                raise RuntimeError(f"cuLaunchKernel: CUDA error {error}, with {kept.value} bytes of parameters")

        return launch

    def _parameters(self, function: Any) -> list[tuple[int, int]]:
        """Return a kernel's parameters as the driver has them: offset and size of each, in bytes."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found: list[tuple[int, int]] = []
        while not self._parameter(function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
            found.append((offset.value, size.value))
        return found


def _needs_more(metadata: Any) -> bool:
    """Say whether a kernel must be launched in a way that is not known here."""
    more = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    return int(metadata.num_ctas) != 1 or any(getattr(metadata, name, 0) for name in more)


def _places(layout: str) -> list[tuple[int, int]]:
    """Return offset and size of each parameter, in bytes, as C lays them out."""
    places, at = [], 0
    for sort in _sorts(layout):
        size = struct.calcsize(sort)
        at = -(-at // size) * size
        places.append((at, size))
        at += size
    return places


def _sorts(layout: str) -> list[str]:
    """Return `7Q2i` as seven `Q` and two `i`."""
    found, count = [], ""
    for character in layout:
        if character.isdigit():
            count += character
        else:
            found += [character] * int(count or 1)
            count = ""
    return found
