"""The CRC-32C of a batch: one canonical walk over first event number, event count and every column's values.

The walk depends on values only, so it does not matter how a batch is compressed, aligned or sliced. It is the
contract that `docs/reference/trace-format.md` describes; changing it makes every trace of the past unreadable.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from .framing import Frame

_NUMBERS = struct.Struct("<qq")
_OFFSET = {4: struct.Struct("<i"), 8: struct.Struct("<q")}


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """What the walk must know of a column: widths in bytes; `offset_bytes` is 0 if it has no offsets.

    `num_buffers` is how many buffers it has in a record batch message.
    """

    item_bytes: int
    offset_bytes: int
    nested: bool
    num_buffers: int

    @classmethod
    def of(cls, kind: pa.DataType) -> "ColumnForm | None":
        """Return a type's form, or None for a type that has no place in a trace of this major version."""
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            item = cls.of(kind.value_type)
            if item is None or item.offset_bytes:
                return None
            return cls(item.item_bytes, 8 if pa.types.is_large_list(kind) else 4, True, 4)
        if pa.types.is_string(kind):
            return cls(1, 4, False, 3)
        if (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and kind.bit_width % 8 == 0:
            return cls(kind.bit_width // 8, 0, False, 2)
        return None


def column_forms(schema: pa.Schema) -> list[ColumnForm]:
    """Return each column's form for the CRC walk; raise `ValueError` for a type that cannot be walked."""
    forms = []
    for field in schema:
        form = ColumnForm.of(field.type)
        if form is None:
            raise ValueError(f"column {field.name} has type {field.type}, which no trace of this major version has")
        forms.append(form)
    return forms


def batch_crc32c(batch: pa.RecordBatch, first_event: int, forms: Sequence[ColumnForm]) -> int:
    """Return the CRC-32C of a batch whose first row has event number `first_event`.

    `forms` holds the form of each column. The batch must be validated and free of nulls.
    """
    crc = crc32c(_NUMBERS.pack(first_event, batch.num_rows))
    for column, form in zip(batch.columns, forms, strict=True):
        crc = _column_crc(column, form, crc)
    return crc


def stored_crc32c(body: memoryview, frame: Frame, first_event: int, forms: Sequence[ColumnForm]) -> int | None:
    """Return what `batch_crc32c` does, from the bytes of a batch that is not compressed; None if those do not show it.

    `body` is the message's; the batch must be validated, and its buffers must lie in there.
    """
    rows = frame.num_rows
    crc: int = crc32c(_NUMBERS.pack(first_event, rows))
    starts, lengths = frame.buffers[:, 0].tolist(), frame.buffers[:, 1].tolist()
    at = 0
    for form in forms:
        begin, width = starts[at + 1], form.offset_bytes
        bound = lengths[at + 1]
        at += form.num_buffers
        if not width:
            crc = crc32c(body[begin : begin + rows * form.item_bytes], crc)
            continue
        end = begin + rows * width
        offset_at = _OFFSET[width].unpack_from
        if bound < end + width - begin or offset_at(body, begin)[0]:
            return None  # an empty column without its offset, or offsets that begin elsewhere
        crc = crc32c(body[begin : end + width], crc)
        (last,) = offset_at(body, end)
        if last:
            begin = starts[at - 1]
            crc = crc32c(body[begin : begin + last * form.item_bytes], crc)
    return crc


def text_crc32c(text: bytes) -> int:
    """Return the CRC-32C of the header's JSON text in UTF-8."""
    return int(crc32c(text))


def _column_crc(column: pa.Array, form: ColumnForm, crc: int) -> int:
    rows, start = len(column), column.offset
    if not form.offset_bytes:
        return _values_crc(column.buffers()[1], start, start + rows, form.item_bytes, crc)
    if rows == 0:  # Arrow allows an empty column to come without its single offset
        return crc32c(bytes(form.offset_bytes), crc)
    buffers, width = column.buffers(), form.offset_bytes
    stored = memoryview(buffers[1])[start * width : (start + rows + 1) * width]
    offset_at = _OFFSET[width].unpack_from
    (first,), (last,) = offset_at(stored, 0), offset_at(stored, rows * width)
    crc = crc32c(np.frombuffer(stored, f"<i{width}") - first if first else stored, crc)
    if last == first:
        return crc
    if form.nested:
        shift = column.values.offset
        return _values_crc(buffers[3], shift + first, shift + last, form.item_bytes, crc)
    return _values_crc(buffers[2], first, last, 1, crc)


def _values_crc(buffer: Any, first: int, last: int, width: int, crc: int) -> int:
    if last <= first:
        return crc
    return crc32c(memoryview(buffer)[first * width : last * width], crc)
