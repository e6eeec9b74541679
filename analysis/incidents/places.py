"""What a report holds, as places: violations and findings at one slot for one request and reason count as one.

A fault that lasts is found anew in every forward, so ten million rows come from far fewer places; where the replay has
merged such rows, each counts as often as it was found. The files are read once, in row groups; what is held is one line a place, and never more than `MAX_HELD_PLACES` lines: past that, neighbouring
slots and positions count as one place, 16, 256, ... at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ...kernels.arrays import Int64Array
from ...kernels.ops.hash.reference import splitmix64_words
from ...replayer.report.findings import FINDING_SCHEMA
from ...replayer.report.violations import PARQUET_ERRORS, VIOLATION_SCHEMA
from ..errors import AnalysisError

# About 120 bytes each, and a quarter more for what was read since they were last folded; three times that while they are.
MAX_HELD_PLACES: Final = 2_000_000
ROWS_AT_ONCE: Final = 65_536
VIOLATION, FINDING = 0, 1
NUMBERS: Final = {
    field.name for schema in (VIOLATION_SCHEMA, FINDING_SCHEMA) for field in schema if pa.types.is_integer(field.type)
}

_VIOLATION_COLUMNS: Final = {
    "event": "event",
    "forward": "forward",
    "last_forward": "last_forward",
    "time_ns": "time_ns",
    "group": "group",
    "slot": "slot",
    "request": "request_id",
    "position": "expected_position",
    "what": "fail_reason_bits",
    "launches": "launch_tag",
    "runners": "runner",
    "rows": "num_forwards",
}
_FINDING_COLUMNS: Final = {
    "event": "event",
    "forward": "forward",
    "last_forward": "forward",
    "time_ns": "time_ns",
    "group": "group",
    "slot": "slot",
    "request": "request_id",
    "position": "position",
    "what": "kind",
    "runners": "runner",
}
_NAME: Final = "request"
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_KEYS: Final = ("source", "what", "group", "slot", "request", "position")
_FIRST: Final = (*_KEYS, "row", "forward", "time_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places, `[n]` each, in order of their first event.

    `source` (violation or finding), `what` (a violation's reason bits, or a number of `kinds`), `group`, `slot`,
    `request`, `position`; `row` is the number of its first row in its file, `event`, `forward`, `time_ns` are that
    row's, `last_forward` is the last of all, `rows` how often it was found, a row a forward; `launches` and `runners` have a bit for each launch tag
    and runner. `names` are the requests' by id. `shift`: slots and positions are counted in units of
    `2 ** shift`; `key` is what `place_keys` gives for their rows.
    """

    columns: dict[str, Int64Array]
    kinds: tuple[str, ...]
    names: dict[int, str]
    shift: int

    def __len__(self) -> int:
        return len(self.columns["key"])

    def __getitem__(self, name: str) -> Int64Array:
        return self.columns[name]


def read_places(report: Path, *, limit: int = MAX_HELD_PLACES) -> Places:
    """Read a report's violations and findings.

    Args:
        report: the folder.
        limit: how many places to hold at most.

    Raises:
        AnalysisError: a file is missing, is no Parquet, or lacks a column.
    """
    kinds: dict[str, int] = {}
    names: dict[int, str] = {}
    held: list[dict[str, Int64Array]] = []
    num_held, shift = 0, 0
    for columns in iter_rows(report, kinds, names):
        held.append(_folded(columns, shift))
        num_held += len(held[-1]["key"])
        if num_held > limit + limit // 4:
            held, shift = _within(held, shift, limit)
            num_held = len(held[0]["key"])
    held, shift = _within(held, shift, limit)
    [found] = held
    order = np.lexsort((found["row"], found["source"], found["event"]))
    return Places(
        columns={name: values[order] for name, values in found.items()}, kinds=tuple(kinds), names=names, shift=shift
    )


def iter_rows(
    report: Path, kinds: dict[str, int], names: dict[int, str] | None = None
) -> Iterator[dict[str, Int64Array]]:
    """Yield a report's rows, all violations first, `ROWS_AT_ONCE` at a time.

    `kinds` learns the kinds of findings, `names` the requests' names.

    Raises:
        AnalysisError: a file is missing, is no Parquet, or lacks a column.
    """
    for source, name, columns in (
        (VIOLATION, "violations", _VIOLATION_COLUMNS),
        (FINDING, "findings", _FINDING_COLUMNS),
    ):
        row = 0
        path = report / f"{name}.parquet"
        with open_parquet(path) as file:
            wanted = list(dict.fromkeys(columns.values())) + ([_NAME] if names is not None else [])
            require_columns(path, file, wanted)
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted):
                values = {ours: _ints(batch[theirs], kinds) for ours, theirs in columns.items()}
                if names is not None:
                    _learn_names(names, values["request"], batch[_NAME])
                values["launches"] = _bit(values["launches"]) if "launches" in values else np.zeros_like(values["slot"])
                values["runners"] = _bit(values["runners"])
                values["source"] = np.full(batch.num_rows, source, np.int64)
                values["row"] = np.arange(row, row + batch.num_rows, dtype=np.int64)
                values["rows"] = np.clip(values.get("rows", np.ones_like(values["slot"])), 1, 1 << 40)
                row += batch.num_rows
                yield values


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a report's file; raise `AnalysisError` if it is none, or is damaged further on."""
    try:
        # Opened here, not by pyarrow, which takes no path that is not UTF-8.
        with path.open("rb") as file, pq.ParquetFile(file) as parquet:
            yield parquet
    except FileNotFoundError:
        raise AnalysisError(f"{path}: missing; the report is incomplete, so replay the trace again") from None
    except PARQUET_ERRORS as error:
        raise AnalysisError(f"{path}: no Parquet file of a report ({error}); replay the trace again") from None


def require_columns(path: Path, file: pq.ParquetFile, names: Any) -> None:
    """Raise `AnalysisError` if a column is not there, or holds text where numbers belong."""
    kinds = {field.name: field.type for field in file.schema_arrow}
    missing = sorted(set(names) - set(kinds))
    if missing:
        raise AnalysisError(
            f"{path}: expected the columns of a report, {', '.join(missing)} missing; replay the trace again"
        )
    wrong = [name for name in names if name in NUMBERS and not pa.types.is_integer(kinds[name])]
    if wrong:
        raise AnalysisError(
            f"{path}: expected numbers in {', '.join(wrong)}, came {kinds[wrong[0]]}; replay the trace again"
        )


def place_keys(columns: dict[str, Int64Array], shift: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each row's place, `[n] uint64`."""
    key = np.zeros(len(columns["row"]), np.uint64)
    for name in _KEYS:
        values = columns[name]
        if shift and name in ("slot", "position"):
            values = values >> shift
        key = splitmix64_words((key ^ values.view(np.uint64)) + _GAMMA)
    return key


def _within(held: list[dict[str, Int64Array]], shift: int, limit: int) -> tuple[list[dict[str, Int64Array]], int]:
    """Fold what is held to at most `limit` places, and no further than that takes, however the rows were read."""
    folded = _folded(_joined(held), shift)
    while len(folded["key"]) > limit and shift < 60:
        shift += 4
        folded = _folded(folded, shift)
    return [folded], shift


def _folded(columns: dict[str, Int64Array], shift: int) -> dict[str, Int64Array]:
    """One line a place: its first row, and counts over all."""
    key = place_keys(columns, shift)
    if not len(key):
        return {**columns, "key": key.view(np.int64)}
    order = np.argsort(key, kind="stable")  # rows come in their order, so the first of a place stays the first
    key = key[order]
    starts = np.flatnonzero(np.concatenate([np.ones(1, np.bool_), key[1:] != key[:-1]]))
    first = order[starts]
    found = {name: columns[name][first] for name in _FIRST}
    found["event"] = np.minimum.reduceat(columns["event"][order], starts)
    found["last_forward"] = np.maximum.reduceat(columns["last_forward"][order], starts)
    found["rows"] = np.add.reduceat(columns["rows"][order], starts)
    for name in ("launches", "runners"):
        found[name] = np.bitwise_or.reduceat(columns[name][order], starts)
    found["key"] = key[starts].view(np.int64)
    return found


def _joined(parts: list[dict[str, Int64Array]]) -> dict[str, Int64Array]:
    names = (*_FIRST, "event", "last_forward", "rows", "launches", "runners")
    if not parts:
        return {name: np.zeros(0, np.int64) for name in names}
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _bit(values: Int64Array) -> Int64Array:
    return np.where((values >= 0) & (values < 62), np.left_shift(1, np.clip(values, 0, 62)), 0)


def _learn_names(names: dict[int, str], requests: Int64Array, column: pa.Array) -> None:
    ids, first = np.unique(requests, return_index=True)
    new = [(int(i), int(at)) for i, at in zip(ids, first, strict=True) if int(i) not in names]
    for (request_id, _), name in zip(
        new, column.take(pa.array([at for _, at in new], pa.int64())).to_pylist(), strict=True
    ):
        names[request_id] = str(name or "")


def _ints(column: pa.Array, kinds: dict[str, int]) -> Int64Array:
    """A column as int64; texts as the numbers of `kinds`. Nulls, which no report has, stand for "none"."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        encoded = column.fill_null("").dictionary_encode()
        numbers = np.array([kinds.setdefault(text, len(kinds)) for text in encoded.dictionary.to_pylist()], np.int64)
        return numbers[encoded.indices.to_numpy()] if len(numbers) else np.zeros(0, np.int64)
    return np.ascontiguousarray(column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False))
