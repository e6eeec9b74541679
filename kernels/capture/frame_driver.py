"""The CUDA driver's launch, called directly: what Triton does around it takes longer than the launch itself.

Python's lock is kept during a launch. It takes two microseconds; whoever gives the lock away for it may find it taken,
and waits for another thread. What stays from launch to launch is laid out once, and `frame_calls` adds the rest.
"""

import ctypes
import functools
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .frame_calls import Place, filler, launcher

# What Triton appends to a kernel's parameters, by version: addresses of scratch memory, of which these kernels use none.
MAX_SCRATCH_ADDRESSES: Final = 2
_BUFFER, _SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*

logger = logging.getLogger("kvcanary")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launch:
    """A kernel that is ready: `fill` takes the parameters that change, `fire` launches it with those filled in last.

    `fire` gets the address of a stream, and returns the driver's error, 0 for none. `kept` is what both of them use.
    `parameters` is the address of the kernel's, and `call` of the four words that the driver is called with, of which
    the first is the address of a configuration; 0 where machine code is not to launch it.
    """

    fill: Callable[..., None]
    fire: Callable[[int], int]
    kept: object = None
    parameters: int = 0
    call: int = 0


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of the driver: programs, threads and the stream of a launch."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


STREAM_OFFSET: Final = _LaunchConfig.stream.offset


class _Block(ctypes.Structure):
    """All that a launch takes, in one place; the kernel's parameters follow."""

    _fields_ = (
        ("config", _LaunchConfig),
        ("call", ctypes.c_void_p * 4),  # configuration, kernel, parameters one by one, parameters in one buffer
        ("extra", ctypes.c_void_p * 5),
        ("length", ctypes.c_size_t),
    )


class CudaDriver:
    """Launches compiled Triton kernels; for the engine's thread.

    Raises:
        OSError: there is no driver.
        AttributeError: it is older than CUDA 12.4, and does not tell a kernel's parameters.
    """

    def __init__(self) -> None:
        driver = ctypes.PyDLL("libcuda.so.1")
        self._launch = driver.cuLaunchKernelEx
        self._parameter = driver.cuFuncGetParamInfo
        self.address = ctypes.cast(self._launch, ctypes.c_void_p).value or 0  # of cuLaunchKernelEx
        self._native = True  # as long as LLVM makes the code
        self._known: dict[int, list[Place]] = {}  # parameters of kernels, by their handles

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
        found = self._parameters(function)
        expected = _places(step + fixed)
        scratch = found[len(expected) :]
        if found[: len(expected)] != expected or [n for _, n in scratch] != [8] * len(scratch):
            return None
        if len(scratch) > MAX_SCRATCH_ADDRESSES:
            return None
        size = found[-1][0] + found[-1][1]
        memory = ctypes.create_string_buffer(ctypes.sizeof(_Block) + size)  # zeros, so no scratch memory
        parameters = ctypes.addressof(memory) + ctypes.sizeof(_Block)
        changing = len(_sorts(step))
        struct.pack_into(fixed, memory, ctypes.sizeof(_Block) + expected[changing][0], *values)
        block = _Block.from_buffer(memory)
        block.config.grid[:] = programs, 1, 1
        block.config.block[:] = 32 * int(metadata.num_warps), 1, 1
        block.config.shared_bytes = int(metadata.shared)
        block.length = size
        length = ctypes.addressof(block) + _Block.length.offset
        block.extra[:] = _BUFFER, parameters, _SIZE, length, _END
        block.call[:] = ctypes.addressof(block), function, None, ctypes.addressof(block) + _Block.extra.offset
        if self._native:
            try:
                fill = filler(tuple(expected[:changing]))(parameters)
                call = ctypes.addressof(block) + _Block.call.offset
                fire = launcher(self.address)(call)
                return Launch(fill=fill, fire=fire, kept=memory, parameters=parameters, call=call)
            except (ImportError, RuntimeError, AttributeError, OSError) as error:
                self._native = False
                logger.warning("kvcanary: launches go through ctypes, which takes longer: %s", error)
        fill = functools.partial(struct.Struct(step).pack_into, memory, ctypes.sizeof(_Block))
        return Launch(fill=fill, fire=self._firing(block), kept=memory)

    def _firing(self, block: _Block) -> Callable[[int], int]:
        """Return what launches by ctypes."""
        launch, config = self._launch, block.config
        where, function, params, extra = map(ctypes.c_void_p, block.call)

        def fire(stream: int) -> int:
            config.stream = stream
            error: int = launch(where, function, params, extra)
            return error

        return fire

    def _parameters(self, function: int) -> list[Place]:
        """Return a kernel's parameters as the driver has them."""
        found = self._known.get(function)
        if found is None:
            offset, size = ctypes.c_size_t(), ctypes.c_size_t()
            found = self._known[function] = []
            while not self._parameter(
                ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
            ):
                found.append((offset.value, size.value))
        return found


def _needs_more(metadata: Any) -> bool:
    """Say whether a kernel must be launched in a way that is not known here."""
    more = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    return int(metadata.num_ctas) != 1 or any(getattr(metadata, name, 0) for name in more)


@functools.cache
def _places(layout: str) -> list[Place]:
    """Return where each parameter lies, as C lays them out."""
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
