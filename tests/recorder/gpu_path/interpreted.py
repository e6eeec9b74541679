"""The CUDA driver by Triton's interpreter: a launch is told by addresses alone, and the kernel runs on what lies there."""

import ctypes
import struct
from types import SimpleNamespace

import torch
from kvcanary.kernels.capture import frame_launch
from kvcanary.kernels.capture.frame_driver import CudaDriver, _LaunchConfig, _places, _sorts
from kvcanary.recorder.capture.device.capture import DeviceCapture

_ITEMS = {torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32}
_FIXED = "3Q8i"
_STEPS = {"take_down_kernel": "7Q6i", "take_back_kernel": "4i"}
# Which numbers, of those that follow the addresses, say how many there are of what an address is of.
_LENGTHS = (9, 4, 9, 9, 10, 10, 3)  # num_loc, num_prefix, and behind the step's six and three addresses bs, num_tokens


class InterpretingDriver(CudaDriver):
    """Has `DeviceCapture` launch as on a GPU; `faults` is what went wrong in a launch, `launches` how many there were."""

    def __init__(self, monkeypatch):
        self._native, self._known = True, {}
        self._forms = {}  # by what stands for a compiled kernel's handle: kernel, its dtypes, and its constants
        self._captures, self.faults, self.launches = [], [], 0

        @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        def launch(config, function, _params, extra):
            try:
                self.launches += 1
                self._run(_LaunchConfig.from_address(config), function, extra)
            except Exception as error:  # noqa: BLE001  # what calls it has no way to raise
                self.faults.append(error)
                return 999
            return 0

        self._launch = launch
        self.address = ctypes.cast(launch, ctypes.c_void_p).value
        for name in _STEPS:
            monkeypatch.setattr(frame_launch, name, _Kernel(name, getattr(frame_launch, name), self._forms))

    def install(self, capture: DeviceCapture, *, machine_code: bool) -> None:
        """Have a capture launch by this driver; with `machine_code` forwards like the last one are told by it."""
        for kernels in capture._kernels:
            kernels._driver = self
        self._captures.append(capture)
        if machine_code:
            capture.repeat(self, capture.frames.device)
            assert capture._repeating._repeater is not None

    def _parameter(self, function, index, offset, size):
        places = _places(_STEPS[self._forms[function.value].name] + _FIXED)
        if index.value >= len(places):
            return 1
        offset._obj.value, size._obj.value = places[index.value]
        return 0

    def _run(self, config, function, extra):
        form = self._forms[function]
        words = (ctypes.c_uint64 * 5).from_address(extra)
        content = ctypes.string_at(words[1], ctypes.c_size_t.from_address(words[3]).value)
        layout = _STEPS[form.name] + _FIXED
        told = [
            struct.unpack_from("<" + sort, content, at)[0]
            for sort, (at, _) in zip(_sorts(layout), _places(layout), strict=True)
        ]
        addresses, rest = told[: len(form.dtypes)], told[len(form.dtypes) :]
        numbers, fixed, sizes = rest[:-11], rest[-11:-8], rest[-8:]
        lengths = [*numbers, None, None, None, *sizes]
        tensors = [
            _at(address, lengths[place], dtype)
            for address, place, dtype in zip(addresses, _LENGTHS, form.dtypes, strict=False)
        ]
        owned = {t.data_ptr(): t for capture in self._captures for kernels in capture._kernels for t in kernels._fixed}
        kept = [owned[address] for address in fixed]
        form.kernel[(config.grid[0],)](*tensors, *numbers, *kept, *sizes, *form.constants)


class _Kernel:
    """A kernel that runs in the interpreter, and returns something to launch it by."""

    def __init__(self, name, kernel, forms):
        self.name, self.kernel, self.forms = name, kernel, forms

    def __getitem__(self, grid):
        def launch(*told):
            self.kernel[grid](*told)
            step = _STEPS[self.name]
            addresses = _sorts(step).count("Q")
            form = SimpleNamespace(
                name=self.name,
                kernel=self.kernel,
                dtypes=[tensor.dtype for tensor in told[:addresses]],
                constants=told[len(_sorts(step + _FIXED)) :],
            )
            handle = 1000 + len(self.forms)
            self.forms[handle] = form
            return SimpleNamespace(function=handle, metadata=SimpleNamespace(num_warps=4, num_ctas=1, shared=0))

        return launch


def _at(address, count, dtype):
    """Return the tensor that lies at an address."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((_ITEMS[dtype] * count).from_address(address), dtype=dtype)
