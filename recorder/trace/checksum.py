"""The CRC-32C of a batch: one canonical walk over first event number, event count and every column's values.

The walk depends on values only, so it does not matter how a batch is compressed, aligned or sliced. It is the
contract that `docs/reference/trace-format.md` describes; changing it makes every trace of the past unreadable.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from .framing import Frame

_NUMBERS = struct.Struct("<qq")
_OFFSET = {4: struct.Struct("<i"), 8: struct.Struct("<q")}


class ColumnForm(NamedTuple):
    """What the walk must know of a column: widths in bytes; `offset_bytes` is 0 if it has no offsets. `num_buffers` is
    how many buffers it has in a record batch message.
    """

    item_bytes: int
    offset_bytes: int
    nested: bool
    num_buffers: int


def column_forms(schema: pa.Schema) -> list[ColumnForm]:
    """Return each column's form for the CRC walk; raise `ValueError` for a type that cannot be walked."""
    return [_column_form(field) for field in schema]


def _column_form(field: pa.Field) -> ColumnForm:
    kind, offset_bytes = (
        field.type,
        4 if pa.types.is_list(field.type) else 8 if pa.types.is_large_list(field.type) else 0,
    )
    if pa.types.is_string(kind):
        return ColumnForm(1, 4, False, 3)
    item = kind.value_type if offset_bytes else kind
    if (pa.types.is_integer(item) or pa.types.is_floating(item)) and item.bit_width % 8 == 0:
        return ColumnForm(item.bit_width // 8, offset_bytes, offset_bytes > 0, 4 if offset_bytes else 2)
    raise ValueError(f"column {field.name} has type {kind}, which no trace of this major version has")


def batch_crc32c(batch: pa.RecordBatch, first_event: int, forms: Sequence[ColumnForm]) -> int:
    """Return the CRC-32C of a validated batch without nulls whose first row has event number `first_event`."""
    columns = (_of_column(column, form) for column, form in zip(batch.columns, forms, strict=True))
    return _crc(first_event, batch.num_rows, forms, columns)


class LeftBuffer(NamedTuple):
    """A buffer of items that a body lacks: its number in the message, and what gives bytes of the body from one to another in parts."""

    number: int
    read: Callable[[int, int], Iterable[memoryview]]


def stored_crc32c(
    body: memoryview, frame: Frame, first_event: int, forms: Sequence[ColumnForm], left: LeftBuffer | None = None
) -> int:
    """Return what `batch_crc32c` does, from a message's body that is not compressed: no Arrow object a buffer is made."""
    columns: list[tuple[memoryview, Any]] = []
    buffers, at = frame.buffers.tolist(), 0
    for form in forms:
        (first, first_bytes), (last, last_bytes) = buffers[at + 1], buffers[at + form.num_buffers - 1]
        items: Any = body[last : last + last_bytes]
        at += form.num_buffers
        if left is not None and at - 1 == left.number:
            items = _Left(left.read, last, last_bytes)
        columns.append((body[first : first + first_bytes], items))
    return _crc(first_event, frame.num_rows, forms, columns)


class _Left(NamedTuple):
    read: Callable[[int, int], Iterable[memoryview]]
    start: int
    size: int

    def parts(self, first: int, last: int) -> Iterable[memoryview]:
        return self.read(self.start + min(first, self.size), self.start + min(last, self.size))


def text_crc32c(text: bytes) -> int:
    """Return the CRC-32C of the header's JSON text in UTF-8."""
    return int(crc32c(text))


def _of_column(column: pa.Array, form: ColumnForm) -> tuple[Any, Any]:
    buffers = [memoryview(buffer) if buffer is not None else memoryview(b"") for buffer in column.buffers()]
    skipped = column.values.offset if form.nested else 0
    return buffers[1][column.offset * (form.offset_bytes or form.item_bytes) :], buffers[-1][
        skipped * form.item_bytes :
    ]


def _crc(first_event: int, rows: int, forms: Sequence[ColumnForm], columns: Iterable[tuple[Any, Any]]) -> int:
    """`columns` are the bytes of each one's offsets, from the first row's on, and of its items; of its items alone without."""
    crc: int = crc32c(_NUMBERS.pack(first_event, rows))
    for form, (leading, items) in zip(forms, columns, strict=True):
        width = form.offset_bytes
        if not width:
            crc = crc32c(leading[: rows * form.item_bytes], crc)
            continue
        if rows == 0:  # Arrow allows an empty column to come without its single offset
            crc = crc32c(bytes(width), crc)
            continue
        offsets, offset_at = leading[: (rows + 1) * width], _OFFSET[width].unpack_from
        (first,), (last,) = offset_at(offsets, 0), offset_at(offsets, rows * width)
        crc = crc32c(np.frombuffer(offsets, f"<i{width}") - first if first else offsets, crc)
        if last > first:
            begin, end = first * form.item_bytes, last * form.item_bytes
            for part in items.parts(begin, end) if isinstance(items, _Left) else (items[begin:end],):
                crc = crc32c(part, crc)
    return crc
