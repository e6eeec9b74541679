"""Arrays that compiled loops find by a number in a table of addresses, since how many there are depends on the trace.

A row of the table is an array's address and its shape, `[n, 3] int64`. Whoever fills it keeps the arrays alive, and has
checked dtype, C order and that they may be written: `AddressTable` does both.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..dispatch import In64x2, register_with_numba
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

    def compiled(build: "_Builder", table: Any, index: Any) -> Any:
        address, rows, columns = (build.word(table, index, column) for column in range(_COLUMNS))
        return build.array(address, [rows, columns][:ndim])

    _register(view, compiled, lambda result: lambda table, index: result, dtype, ndim)  # noqa: ARG005
    return view


def _list(dtype: str) -> Callable[[In64x2, int, int], npt.NDArray[Any]]:
    """Return a primitive that gives an event's list: of column `number`, whose offsets are `NUM_LISTS` arrays further on."""
    values, offsets = _view(dtype, 1), _view("int64", 1)

    def view(table: In64x2, number: int, event: int) -> npt.NDArray[Any]:
        ends = offsets(table, number + NUM_LISTS)
        return values(table, number)[ends[event] : ends[event + 1]]

    def compiled(build: "_Builder", table: Any, number: Any, event: Any) -> Any:
        ends = build.word(table, build.plus(number, NUM_LISTS), 0)
        begin = build.item(ends, event)
        size = build.minus(build.item(ends, build.plus(event, 1)), begin)
        return build.array(build.address(build.word(table, number, 0), begin), [size])

    _register(view, compiled, lambda result: lambda table, number, event: result, dtype, 1)  # noqa: ARG005
    return view


def _register(
    view: Callable[..., Any], compiled: Callable[..., Any], typer: Callable[[Any], Any], dtype: str, ndim: int
) -> None:
    def register(numba: Any) -> None:
        types = numba.types
        result = types.Array(getattr(types, dtype), ndim, "C", aligned=True)
        numba.extending.type_callable(view)(lambda _context: typer(result))

        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            from numba.np.arrayobj import make_array

            table = make_array(signature.args[0])(context, builder, arguments[0]).data
            given = zip(arguments[1:], signature.args[1:], strict=True)
            numbers = [context.cast(builder, value, kind, types.int64) for value, kind in given]
            return compiled(_Builder(context, builder, result, np.dtype(dtype).itemsize), table, *numbers)

        integers = [types.Integer] * (compiled.__code__.co_argcount - 2)
        numba.extending.lower_builtin(view, types.Array, *integers)(lower)

    register_with_numba(register)


class _Builder:
    """Builds the machine code of a view, in LLVM's terms."""

    def __init__(self, context: Any, builder: Any, result: Any, item_bytes: int) -> None:
        self._context, self._builder, self._result, self._item_bytes = context, builder, result, item_bytes

    def plus(self, value: Any, number: int) -> Any:
        return self._builder.add(value, value.type(number))

    def minus(self, value: Any, other: Any) -> Any:
        return self._builder.sub(value, other)

    def word(self, table: Any, row: Any, column: int) -> Any:
        """Return a word of the table of addresses."""
        place = self.plus(self._builder.mul(row, row.type(_COLUMNS)), column)
        return self._builder.load(self._builder.gep(table, [place]))

    def item(self, address: Any, index: Any) -> Any:
        """Return an int64 of an array that lies at an address."""
        pointer = self._builder.inttoptr(address, index.type.as_pointer())
        return self._builder.load(self._builder.gep(pointer, [index]))

    def address(self, first: Any, index: Any) -> Any:
        """Return where an item lies of an array of the result's dtype."""
        return self._builder.add(first, self._builder.mul(index, index.type(self._item_bytes)))

    def array(self, address: Any, shape: list[Any]) -> Any:
        """Return a packed array that lies at an address; its memory is the table's owner's."""
        from numba.np.arrayobj import make_array, populate_array

        array = make_array(self._result)(self._context, self._builder)
        size = address.type(self._item_bytes)
        strides = [self._builder.mul(shape[1], size), size] if len(shape) == 2 else [size]
        data = self._builder.inttoptr(address, array.data.type)
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
        return array._getvalue()


int64s: Final = _view("int64", 1)
int64_rows: Final = _view("int64", 2)
uint64_rows: Final = _view("uint64", 2)
int32s: Final = _view("int32", 1)
int32_rows: Final = _view("int32", 2)
uint8s: Final = _view("uint8", 1)
uint8_rows: Final = _view("uint8", 2)
int64_list: Final = _list("int64")
uint64_list: Final = _list("uint64")
