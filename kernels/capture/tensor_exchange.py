"""DLPack's exchange of C functions: a tensor's address, type and length without any object being made.

A tensor's own methods answer one question each, through Python; here one C function answers all, for machine code too.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

VERSION: Final = 1  # DLPACK_MAJOR_VERSION
CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA


class TensorView(ctypes.Structure):
    """`DLTensor`; `kind` is its number of dimensions and its type of elements."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("kind", ctypes.c_uint64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    @property
    def dimensions(self) -> int:
        """How many there are."""
        return int(self.kind & 0xFFFFFFFF)


class _Exchange(ctypes.Structure):
    """`DLPackExchangeAPI`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_python", ctypes.c_void_p),
        ("managed_to_python", ctypes.c_void_p),
        ("tensor_from_python", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


class TensorExchange:
    """torch's exchange: `view` is the address of what fills in a `TensorView`, `stream` of what gives a device's stream.

    Both return 0, or have raised; `view` takes an object and a view, `stream` a device's type, its number and where the
    stream's address is to be put.

    Raises:
        AttributeError: this torch has no such exchange.
        ValueError: it has another one.
    """

    def __init__(self) -> None:
        import torch

        capsule = torch.Tensor.__dlpack_c_exchange_api__
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        found = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
        if found.major != VERSION:
            raise ValueError(f"DLPack's exchange has version {found.major}, expected {VERSION}")
        self.view, self.stream = int(found.tensor_from_python or 0), int(found.current_stream or 0)
        if not self.view or not self.stream:
            raise ValueError("this torch's DLPack exchange does not read tensors in place")
        self._look: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(TensorView))(
            self.view
        )

    def look(self, tensor: Any) -> TensorView:
        """Return a tensor's view, which its shape and strides belong to.

        Raises:
            Exception: what torch raises for anything else.
        """
        found = TensorView()
        self._look(tensor, ctypes.byref(found))
        return found
