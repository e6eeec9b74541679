"""Query results on their way out: text, CSV, JSON, Parquet or Arrow, batch by batch."""

import csv
import io
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import AnalysisError
from .text_table import text_table

FORMATS: Final = ("table", "csv", "json", "parquet", "arrow")
BINARY_FORMATS: Final = ("parquet", "arrow")


def write_result(reader: pa.RecordBatchReader, sink: IO[bytes], form: str, *, max_rows: int | None) -> None:
    """Write a result to a binary stream in one of `FORMATS`.

    Args:
        reader: the rows.
        sink: where to.
        form: a name of `FORMATS`.
        max_rows: in a text table, how many rows are shown; None for all.

    Raises:
        OSError: `sink` cannot be written.
        pa.ArrowException: the query failed under way.
    """
    if form == "parquet":
        with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), reader.schema, compression="zstd") as parquet:
            for batch in reader:
                parquet.write_batch(batch)
    elif form == "arrow":
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), reader.schema) as arrow:
            for batch in reader:
                arrow.write_batch(batch)
    else:
        text = io.TextIOWrapper(sink, encoding="utf-8", errors="backslashreplace", write_through=True)
        if form == "table":
            _table(reader, text, max_rows)
        else:
            (_csv if form == "csv" else _json)(reader, text)
        text.flush()
        text.detach()


def spare(kept: Iterable[Path], target: Path) -> None:
    """Raise `AnalysisError` where a result would take the place of a file that it is made of."""
    try:
        same = target.exists() and any(path.exists() and path.samefile(target) for path in kept)
    except OSError:  # told where it is written
        return
    if same:
        raise AnalysisError(f"{target}: what is asked for is made of this file; name another with -o")


def open_private(path: Path) -> IO[bytes]:
    """Open a file for writing, readable by this user only where it is new: tokens are private. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "wb")


def _csv(reader: pa.RecordBatchReader, text: IO[str]) -> None:
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(reader.schema.names)
    for batch in reader:
        writer.writerows([_flat(value) for value in row] for row in _rows(batch))


def _json(reader: pa.RecordBatchReader, text: IO[str]) -> None:
    """A list of objects, one a line; a column name that comes twice keeps its last value."""
    names = reader.schema.names
    separator = "[\n"
    for batch in reader:
        for row in _rows(batch):
            text.write(separator + json.dumps(dict(zip(names, row, strict=True)), default=_plain))
            separator = ",\n"
    text.write("[]\n" if separator == "[\n" else "\n]\n")


def _table(reader: pa.RecordBatchReader, text: IO[str], max_rows: int | None) -> None:
    names = reader.schema.names
    if not names:
        text.write("done\n")
        return
    shown: list[dict[int, Any]] = []
    num_rows = 0
    for batch in reader:
        if max_rows is None or len(shown) < max_rows:
            left = batch if max_rows is None else batch.slice(0, min(max_rows - len(shown), batch.num_rows))
            shown += [dict(enumerate(row)) for row in _rows(left)]
        num_rows += batch.num_rows
    for line in text_table(shown, list(range(len(names))), headings=names):
        text.write(line + "\n")
    hidden = f", {len(shown):,} shown; --rows 0 shows all" if len(shown) < num_rows else ""
    text.write(f"({num_rows:,} row{'' if num_rows == 1 else 's'}{hidden})\n")


def _rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _flat(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=_plain)
    return _plain(value) if isinstance(value, bytes) else value


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
