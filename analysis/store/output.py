"""Query results on their way out: text, CSV, JSON, Parquet or Arrow, batch by batch."""

import contextlib
import csv
import errno
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ...recorder.errors import printable
from ...recorder.files import partial_path
from ...recorder.text_tables import cell_text, text_table
from ..errors import AnalysisError

FORMATS: Final = ("table", "tab", "csv", "json", "parquet", "arrow")
BINARY_FORMATS: Final = ("parquet", "arrow")
_ESCAPES: Final = {9: r"\t", 10: r"\n", 13: r"\r", 92: r"\\"}


def write_result(
    reader: pa.RecordBatchReader,
    sink: IO[bytes],
    form: str,
    *,
    max_rows: int | None = None,
    width: int | None = None,
    expanded: bool = False,
    on_screen: bool = False,
) -> None:
    """Write a result to a binary stream in one of `FORMATS`.

    A text table shows `max_rows` and is at most `width` wide, None for no bound; `expanded`: a line a value instead.
    `on_screen`: a terminal reads along, and nothing in a cell may steer it.
    Raise `OSError` if `sink` cannot be written, `pa.ArrowException` if the query failed under way.
    """
    if form in BINARY_FORMATS:
        _binary(reader, sink, form)
    else:
        text = io.TextIOWrapper(sink, encoding="utf-8", errors="backslashreplace", write_through=True)
        if form == "table":
            _table(reader, text, max_rows, width, expanded)
        elif form == "tab":
            _tabs(reader, text)
        elif form == "csv":
            _csv(reader, text, printable if on_screen else str)
        else:
            _json(reader, text)
        text.flush()
        text.detach()


def spare(kept: Iterable[Path], target: Path) -> None:
    """Raise `AnalysisError` if a result would take the place of a file that it is made of."""
    try:
        same = target.exists() and any(path.exists() and path.samefile(target) for path in kept)
    except OSError:  # reported where it is written
        return
    if same:
        raise AnalysisError(f"{target}: what is asked for is made of this file; name another with -o")


@contextlib.contextmanager
def private_output(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for a result, readable by this user only; it takes its place when all is written, else nothing does.

    A device, a pipe and a link are written through and never replaced, and so is a file in a folder that takes no new
    one; a file that was written through to the middle is left empty. Raises `OSError`.
    """
    if not path.is_symlink() and (path.is_file() or not path.exists()):
        partial = partial_path(path)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not path.is_file():
                raise
        else:
            try:
                with os.fdopen(descriptor, "wb") as file:
                    yield file
                partial.replace(path)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
            return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if regular:
        os.ftruncate(descriptor, 0)
    with os.fdopen(descriptor, "wb") as file:
        try:
            yield file
            file.flush()
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()  # which writes what it still holds
            if regular:
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
            raise


class _Cuttable(io.RawIOBase):
    """A stream that can be cut off: what is written from then on goes nowhere."""

    def __init__(self, sink: IO[bytes]) -> None:
        self.sink: IO[bytes] | None = sink

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.sink.write(data) if self.sink is not None else len(data)


def _binary(reader: pa.RecordBatchReader, sink: IO[bytes], form: str) -> None:
    """Write Parquet or Arrow; both write their footer after an error too, and half a result would look whole."""
    given = _Cuttable(sink)
    file, schema = pa.PythonFile(given, mode="w"), reader.schema
    with (
        pq.ParquetWriter(file, schema, compression="zstd")
        if form == "parquet"
        else pa.ipc.new_file(file, schema) as writer
    ):
        try:
            for batch in reader:
                writer.write_batch(batch)
        except BaseException:
            given.sink = None
            raise
    sink.flush()


def _csv(reader: pa.RecordBatchReader, text: IO[str], shown: Callable[[str], str]) -> None:
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([shown(name) for name in reader.schema.names])
    for batch in reader:
        for row in _rows(batch):
            cells = (_flat(value) for value in row)
            writer.writerow([shown(cell) if isinstance(cell, str) else cell for cell in cells])


def _json(reader: pa.RecordBatchReader, text: IO[str]) -> None:
    """A list of objects, one a line; a name that comes again is numbered, and a float that JSON has not is null."""
    names = _distinct(reader.schema.names)
    separator = "[\n"
    for batch in reader:
        for row in _rows(batch):
            values = dict(zip(names, row, strict=True))
            try:
                line = json.dumps(values, default=_plain, allow_nan=False)
            except ValueError:
                line = json.dumps(_finite(values), default=_plain)
            text.write(separator + line)
            separator = ",\n"
    text.write("[]\n" if separator == "[\n" else "\n]\n")


def _distinct(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        free = name
        number = 0
        while free in found or (number and free in names):
            number += 1
            free = f"{name}_{number}"
        found.append(free)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(
    reader: pa.RecordBatchReader, text: IO[str], max_rows: int | None, width: int | None, expanded: bool
) -> None:
    names = reader.schema.names
    if not names:
        text.write("done\n")
        return
    shown: list[dict[int, Any]] = []
    num_rows = 0
    for batch in reader:
        left = batch.num_rows if max_rows is None else max(0, max_rows - len(shown))
        shown += [dict(enumerate(row)) for row in _rows(batch.slice(0, left))] if left else []
        num_rows += batch.num_rows
    lines = _expanded(shown, names) if expanded else text_table(shown, range(len(names)), headings=names, width=width)
    text.writelines(f"{line}\n" for line in lines)
    hidden = f", {len(shown):,} shown; --rows 0 shows all" if len(shown) < num_rows else ""
    text.write(f"({num_rows:,} row{'' if num_rows == 1 else 's'}{hidden})\n")


def _expanded(rows: Sequence[Mapping[int, Any]], names: Sequence[str]) -> list[str]:
    """Return a line a value, with a line above each row that counts it."""
    titles = [printable(name) for name in names]
    longest = max(map(len, titles))
    lines: list[str] = []
    for number, row in enumerate(rows, 1):
        lines.append(f"-- row {number} --")
        lines += [f"{title:{longest}}  {cell_text(row[i])}".rstrip() for i, title in enumerate(titles)]
    return lines


def _tabs(reader: pa.RecordBatchReader, text: IO[str]) -> None:
    r"""A line a row, cells apart by tabs; a tab, line break or backslash in a cell is written as \t, \n, \r, \\."""
    text.write("\t".join(map(printable, reader.schema.names)) + "\n")
    for batch in reader:
        for row in _rows(batch):
            cells = ("" if value is None else str(_flat(value)) for value in row)
            text.write("\t".join(cell.translate(_ESCAPES) for cell in cells) + "\n")


def _rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _flat(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=_plain)
    return _plain(value) if isinstance(value, bytes) else value


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
