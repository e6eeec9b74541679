"""Arrays that compiled loops find by a number in a table of addresses, since how many there are depends on the trace.

A row of the table is an array's address and its shape, `[n, 3] int64`. Whoever fills it keeps the arrays alive, and has
checked dtype, C order and that they may be written: `AddressTable` does both.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..dispatch import ArraySpec, In64x2, parameter_of, register_compiled, type_hints

_T = TypeVar("_T")


class AddressTable:
    """Fills a table, `rows` `[n, 3] int64`, and keeps its arrays alive."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        self._rows: list[tuple[int, int, int]] = []

    def add(self, *arrays: npt.NDArray[Any] | tuple[Any, ...]) -> int:
        """Append arrays of one or two axes, or tuples of such; return the first's number. Raise `ValueError` for others."""
        first = len(self._rows)
        for array in arrays:
            if isinstance(array, tuple):
                self.add(*array)
                continue
            if not (1 <= array.ndim <= 2 and array.flags.c_contiguous and array.flags.aligned):
                raise ValueError(
                    f"an array of shape {list(array.shape)} with strides {list(array.strides)}, expected packed"
                )
            self._arrays.append(array)
            address = array.__array_interface__["data"][0]
            self._rows.append((address, array.shape[0], array.shape[1] if array.ndim == 2 else 1))
        return first

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The table."""
        return np.array(self._rows, np.int64).reshape(-1, 3)


def record(kind: type[_T], *, ends: int = 0) -> Callable[..., _T]:
    """Return a primitive that makes a `kind`, a named tuple of arrays, ints and such named tuples, or one array's type.

    It takes the table and the number of the first array, the others being those behind it; with `ends` an index, too: then
    an array is what lies between offset `index` and the next, which array number `ends` behind it has. A last argument
    `[n] int64`, packed, has the ints, if there are any; if there are only ints it is the only one.
    """
    leaves = list(_leaves(kind))
    has_numbers, has_arrays = None in leaves, any(leaves)

    def make(*given: Any) -> Any:
        numbers = iter(map(int, given[-1])) if has_numbers else iter(())
        arrays = itertools.count(given[1] if has_arrays else 0)

        def made(hint: Any) -> Any:
            if hint is int:
                return next(numbers)
            spec = parameter_of(hint)
            if isinstance(spec, list):
                return hint(*map(made, type_hints(hint).values()))
            place = next(arrays)
            found = _array(given[0], place, spec)
            if not ends:
                return found
            offsets = _array(given[0], place + ends, _OFFSETS)
            return found[offsets[given[2]] : offsets[given[2] + 1]]

        return made(kind)

    register_compiled(lambda compiling: compiling.add_record(make, kind, ends=ends))
    return make


_OFFSETS: Final = ArraySpec("int64", 1, written=False, packed=True)


def _leaves(hint: Any) -> Iterable[Any]:
    spec = parameter_of(hint)
    return itertools.chain(*map(_leaves, type_hints(hint).values())) if isinstance(spec, list) else (spec,)


def _array(table: In64x2, index: int, spec: Any) -> npt.NDArray[Any]:
    address, rows, columns = (int(word) for word in table[index])
    shape = (rows, columns)[: spec.ndim]
    if rows * columns == 0:
        return np.zeros(shape, spec.dtype)
    memory = (ctypes.c_char * (rows * columns * np.dtype(spec.dtype).itemsize)).from_address(address)
    return np.ndarray(shape, spec.dtype, memory)
