"""Arrays that compiled loops find by a number in a table of addresses, since how many there are depends on the trace.

A row of the table is an array's address and its shape, `[n, 3] int64`. Whoever fills it keeps the arrays alive, and has
checked dtype, C order and that they may be written: `AddressTable` does both.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..dispatch import In64x2, register_compiled
from .layout import NUM_LISTS

_COLUMNS: Final = 3


class AddressTable:
    """Fills a table, `rows` `[n, 3] int64`, and keeps its arrays alive."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        self._rows: list[tuple[int, int, int]] = []

    def add(self, *arrays: npt.NDArray[Any]) -> int:
        """Append arrays of one or two axes, and return the number of the first; raise `ValueError` for others."""
        first = len(self._rows)
        for array in arrays:
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
        return np.array(self._rows, np.int64).reshape(-1, _COLUMNS)


def _view(dtype: str, ndim: int) -> Callable[[In64x2, int], npt.NDArray[Any]]:
    """Return a primitive that gives array number `index` of a table as one of this dtype and so many axes."""

    def view(table: In64x2, index: int) -> npt.NDArray[Any]:
        address, rows, columns = (int(word) for word in table[index])
        shape = (rows, columns)[:ndim]
        if rows * columns == 0:
            return np.zeros(shape, dtype)
        memory = (ctypes.c_char * (rows * columns * np.dtype(dtype).itemsize)).from_address(address)
        return np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]

    def lower(build: Any, table: Any, index: Any) -> Any:
        address, *lengths = (_word(build, table, index, column) for column in range(ndim + 1))
        return build.view(address, lengths)

    register_compiled(lambda compiling: compiling.add_view_maker(view, dtype, ndim, lower))
    return view


def _list(dtype: str) -> Callable[[In64x2, int, int], npt.NDArray[Any]]:
    """Return a primitive that gives an event's list: of column `number`, whose offsets are `NUM_LISTS` arrays further on."""
    values, offsets = _view(dtype, 1), _view("int64", 1)

    def view(table: In64x2, number: int, event: int) -> npt.NDArray[Any]:
        ends = offsets(table, number + NUM_LISTS)
        return values(table, number)[ends[event] : ends[event + 1]]

    def lower(build: Any, table: Any, number: Any, event: Any) -> Any:
        ends = build.inttoptr(_word(build, table, build.plus(number, NUM_LISTS), 0), table.type)
        begin = build.load(build.gep(ends, [event]))
        end = build.load(build.gep(ends, [build.plus(event, 1)]))
        first = build.mul(begin, begin.type(np.dtype(dtype).itemsize))
        return build.view(build.add(_word(build, table, number, 0), first), [build.sub(end, begin)])

    register_compiled(lambda compiling: compiling.add_view_maker(view, dtype, 1, lower))
    return view


def _word(build: Any, table: Any, row: Any, column: int) -> Any:
    """Build the load of a word of the table of addresses."""
    place = build.plus(build.mul(row, row.type(_COLUMNS)), column)
    return build.load(build.gep(table, [place]))


int64s: Final = _view("int64", 1)
int64_rows: Final = _view("int64", 2)
uint64_rows: Final = _view("uint64", 2)
int32s: Final = _view("int32", 1)
int32_rows: Final = _view("int32", 2)
uint8s: Final = _view("uint8", 1)
uint8_rows: Final = _view("uint8", 2)
int64_list: Final = _list("int64")
uint64_list: Final = _list("uint64")
