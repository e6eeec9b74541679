"""The files of a table of reports: written with a checksum over all of it, and read by it before a row counts.

The checksum lies between the rows and Parquet's footer, where no reader looks: `MAGIC`, and the CRC-32C of the rest in four bytes,
little-endian. A file without one, of an older version or another program, is not read: in Parquet's readers a changed bit may end
the process.
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
_READERS: Final = 16
_LARGE_BYTES: Final = 1 << 28  # no report makes so large a file
_OF_A_ROW: Final = ("report_id", "ended")
_REMAKE: Final = "collect its report again (kvcanary collect), which puts one there that can be checked"


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

    Of sound files of one report, in several partitions, the newest is taken: its recording goes on longer, or it was written later.
    """
    found = [one for one in listed if one.is_file and one.path.endswith(".parquet")]
    found = sorted((one for one in found if "/." not in one.path.removeprefix(top)), key=lambda one: one.path)
    problems: dict[str, str] = {}
    newest: dict[str, tuple[Any, ...]] = {}
    for file, (why, row) in zip(found, _looked_at(filesystem, found, schema), strict=True):
        if why:
            problems[file.path] = why
        else:
            report_id = row["report_id"] or file.path
            ended = row["ended"].timestamp() if row["ended"] is not None else 0.0
            age = (ended, file.mtime_ns or 0, file.path)
            newest[report_id] = max(newest.get(report_id, age), age)
    return sorted(path for *_, path in newest.values()), problems


def _looked_at(
    filesystem: Any, files: Sequence[pyarrow.fs.FileInfo], schema: pa.Schema
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return of each file why it is left out, if it is, and its report's id and end."""

    def look(file: pyarrow.fs.FileInfo) -> tuple[str, dict[str, Any]]:
        if file.size > _LARGE_BYTES:
            return f"it has {file.size:,} bytes, and is no report's row", {}
        try:
            with filesystem.open_input_file(file.path) as source:
                content = source.read()
            damage = _damage(content)
            return (damage, {}) if damage else _misfit(pq.ParquetFile(pa.BufferReader(content)), file.path, schema)
        except (OSError, pa.ArrowException, ValueError) as error:  # a name that is no UTF-8 is a ValueError
            return first_line(error), {}

    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(look, files)


def _damage(content: bytes) -> str:
    """Say what is wrong with a file's bytes, before anything in them is trusted."""
    if len(content) < _TAIL.size:
        return f"it has {len(content)} bytes, and is no Parquet file"
    if MAGIC not in content:
        return f"it has no checksum, as if an older version or another program wrote it; {_REMAKE}"
    at = _footer_at(content) - _SUM.size
    if at >= len(MAGIC) and content[at - len(MAGIC) : at] == MAGIC:
        [expected] = _SUM.unpack_from(content, at)
        if crc32c(content[at + _SUM.size :], crc32c(content[: at - len(MAGIC)])) == expected:
            return ""
    return "it is damaged: its checksum does not hold"


def _misfit(file: pq.ParquetFile, path: str, schema: pa.Schema) -> tuple[str, dict[str, Any]]:
    """Say what of a sound file's columns is not as this version knows it, or that it is a copy; and whose report it is."""
    for column in file.schema_arrow:
        at = schema.get_field_index(column.name)
        if at >= 0 and not _fits(column.type, schema.field(at).type):
            return f"its column {column.name} is {column.type}, expected {schema.field(at).type}", {}
    there = [name for name in _OF_A_ROW if name in file.schema_arrow.names and file.metadata.num_rows == 1]
    row = dict.fromkeys(_OF_A_ROW) | (file.read(there).to_pylist()[0] if there else {})
    owner, name = row["report_id"], PurePosixPath(path).stem
    return (f"it is a copy of {owner}.parquet" if owner and owner != name else ""), row


def _fits(given: pa.DataType, known: pa.DataType) -> bool:
    """Whether a column can be read as this version knows it: fields of its rows may be missing, or be more."""
    if pa.types.is_list(given) and pa.types.is_list(known):
        return _fits(given.value_type, known.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        there = {field.name: field.type for field in given}
        return all(_fits(there[field.name], field.type) for field in known if field.name in there)
    return bool(given == known)
