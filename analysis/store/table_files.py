"""The files of a table of reports: written with a checksum over all of it, and read by it before a row counts.

The checksum lies between the rows and Parquet's footer, where no reader looks: `MAGIC`, and the CRC-32C of the rest in four bytes,
little-endian. Files of older versions, and of others, have none; of those everything is read once instead.
"""

import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from crc32c import crc32c

from ...recorder.errors import first_line

MAGIC: Final = b"KVCANCRC"
_SUM: Final = struct.Struct("<I")
_TAIL: Final = struct.Struct("<I4s")  # the footer's length, and Parquet's own magic
UNKNOWN: Final = "unknown"  # the id of a report whose trace has none
_READERS: Final = 16
_LARGE_BYTES: Final = 1 << 26  # of a file that no report makes the footer alone is read


def parquet_file(rows: pa.Table, *, packed: bool) -> bytes:
    """Return rows as a Parquet file with a checksum; `packed` ones compressed."""
    content = io.BytesIO()
    pq.write_table(rows, content, compression="zstd" if packed else "none", use_dictionary=packed)
    plain = content.getvalue()
    at = _footer_at(plain)
    return plain[:at] + MAGIC + _SUM.pack(crc32c(plain)) + plain[at:]


def _footer_at(content: bytes) -> int:
    """Return where the footer begins; negative, or past the end, in what is no Parquet file."""
    length, _ = _TAIL.unpack(content[-_TAIL.size :])
    return len(content) - _TAIL.size - int(length)


def sound_files(
    filesystem: Any, top: str, listed: Iterable[pyarrow.fs.FileInfo], schema: pa.Schema
) -> tuple[list[str], dict[str, str]]:
    """Return the files of the table in the folder `top` to be read, in order, and of those that are left out why.

    Of sound files of one report, in several partitions, the newest is taken: it has been copied, or its first forward came later.
    """
    found = [one for one in listed if one.is_file and one.path.endswith(".parquet")]
    found = sorted((one for one in found if "/." not in one.path.removeprefix(top)), key=lambda one: one.path)
    problems: dict[str, str] = {}
    newest: dict[str, pyarrow.fs.FileInfo] = {}
    for file, (why, report_id) in zip(found, _looked_at(filesystem, found, schema), strict=True):
        if why:
            problems[file.path] = why
        else:  # by report, and what is nobody's alone by itself: rows that others wrote, reports whose trace has no id
            key = file.path if report_id in ("", UNKNOWN) else report_id
            newest[key] = max(newest.get(key, file), file, key=_age)
    return sorted(one.path for one in newest.values()), problems


def _age(file: pyarrow.fs.FileInfo) -> tuple[int, str]:
    return (file.mtime_ns or 0, file.path)


def _looked_at(filesystem: Any, files: Sequence[pyarrow.fs.FileInfo], schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Return of each file why it is left out, if it is, and whose report it is, if it is one's."""

    def look(file: pyarrow.fs.FileInfo) -> tuple[str, str]:
        try:
            with filesystem.open_input_file(file.path) as source:
                if file.size > _LARGE_BYTES:
                    return _misfit(pq.ParquetFile(source), file.path, schema)
                content = source.read()
            damage = _damage(content)
            return (damage, "") if damage else _misfit(pq.ParquetFile(pa.BufferReader(content)), file.path, schema)
        except (OSError, pa.ArrowException, ValueError) as error:  # a name that is no UTF-8 is a ValueError
            return first_line(error), ""

    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(look, files)


def _damage(content: bytes) -> str:
    """Say what is wrong with a file's bytes, before anything in them is trusted."""
    if len(content) < _TAIL.size:
        return f"it has {len(content)} bytes, and is no Parquet file"
    if MAGIC not in content:
        pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
        return ""
    at = _footer_at(content) - _SUM.size
    if at >= len(MAGIC) and content[at - len(MAGIC) : at] == MAGIC:
        [expected] = _SUM.unpack_from(content, at)
        if crc32c(content[at + _SUM.size :], crc32c(content[: at - len(MAGIC)])) == expected:
            return ""
    return "it is damaged: its checksum does not hold"


def _misfit(file: pq.ParquetFile, path: str, schema: pa.Schema) -> tuple[str, str]:
    """Say what of a file's columns is not as this version knows it, or that it is a copy; and whose report it is."""
    for column in file.schema_arrow:
        at = schema.get_field_index(column.name)
        if at >= 0 and not _fits(column.type, schema.field(at).type):
            return f"its column {column.name} is {column.type}, expected {schema.field(at).type}", ""
    owner, name = _report_id(file.metadata), PurePosixPath(path).stem
    return (f"it is a copy of {owner}.parquet" if owner not in ("", name) else ""), owner


def _report_id(metadata: pq.FileMetaData) -> str:
    """Return the report of a file of one row, by its footer; "" if that does not say."""
    if metadata.num_rows != 1:
        return ""
    group = metadata.row_group(0)
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "report_id" and column.statistics is not None and column.statistics.has_min_max:
            return str(column.statistics.min)
    return ""


def _fits(given: pa.DataType, known: pa.DataType) -> bool:
    """Whether a column can be read as this version knows it: fields of its rows may be missing, or be more."""
    if pa.types.is_list(given) and pa.types.is_list(known):
        return _fits(given.value_type, known.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        there = {field.name: field.type for field in given}
        return all(_fits(there[field.name], field.type) for field in known if field.name in there)
    return bool(given == known)
