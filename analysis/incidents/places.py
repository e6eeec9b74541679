"""What a report holds, as places: violations and findings at one slot for one request and reason count as one.

A fault that lasts is found anew in every forward, so ten million rows come from far fewer places; where the replay has
merged such rows, each counts as often as it was found. The files are read once, in row groups; what is held is one line
a place, and never more than `MAX_HELD_PLACES` lines: past that, neighbouring slots and positions count as one place, 16,
256, ... at a time.
"""

from collections.abc import Iterable, Iterator
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
from ...recorder.remote import arrow_file
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

_BOTH: Final = {name: name for name in ("event", "forward", "time_ns", "group", "slot")} | {
    "request": "request_id",
    "runners": "runner",
}
# Ours by theirs, of each file.
_FILES: Final = {
    "violations": _BOTH
    | {
        "last_forward": "last_forward",
        "position": "expected_position",
        "what": "fail_reason_bits",
        "launches": "launch_tag",
        "rows": "num_forwards",
    },
    "findings": _BOTH | {"last_forward": "forward", "position": "position", "what": "kind"},
}
_NAME: Final = "request"
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_KEYS: Final = ("source", "what", "group", "slot", "request", "position")
_FIRST: Final = (*_KEYS, "row", "forward", "time_ns")
_OVER_ALL: Final = {
    "event": np.minimum,
    "last_forward": np.maximum,
    "rows": np.add,
    "launches": np.bitwise_or,
    "runners": np.bitwise_or,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places, `[n]` each, in order of their first event.

    `source` (violation or finding), `what` (a violation's reason bits, or a number of `kinds`), `group`, `slot`,
    `request`, `position`; `row` is the number of its first row in its file, `event`, `forward`, `time_ns` are that
    row's, `last_forward` is the last of all, `rows` how often it was found, a row a forward; `launches` and `runners`
    have a bit for each launch tag and runner. `names` are the requests' by id. `shift`: slots and positions are counted
    in units of `2 ** shift`; `key` is what `place_keys` gives for their rows.
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
    """Read a report's violations and findings, `limit` places at most.

    Raise `AnalysisError` if a file is missing, is no Parquet, or lacks a column.
    """
    kinds: dict[str, int] = {}
    names: dict[int, str] = {}
    held: list[dict[str, Int64Array]] = []
    shift = 0
    for columns in iter_rows(report, kinds, names):
        held.append(_folded(columns, shift))
        if sum(len(part["key"]) for part in held) > limit + limit // 4:
            held, shift = _within(held, shift, limit)
    [found], shift = _within(held, shift, limit)
    order = np.lexsort((found["row"], found["source"], found["event"]))
    ordered = {name: values[order] for name, values in found.items()}
    return Places(columns=ordered, kinds=tuple(kinds), names=names, shift=shift)


def iter_rows(
    report: Path, kinds: dict[str, int], names: dict[int, str] | None = None
) -> Iterator[dict[str, Int64Array]]:
    """Yield a report's rows, all violations first, `ROWS_AT_ONCE` at a time.

    `kinds` learns the kinds of findings, `names` the requests' names.

    Raise `AnalysisError` if a file is missing, is no Parquet, or lacks a column.
    """
    for source, (name, columns) in enumerate(_FILES.items()):
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


def count_rows(places: Places, chosen: Int64Array, of: Int64Array) -> Iterable[tuple[list[int], int]]:
    """Return how often chosen places were found, by `of` `[chosen]`, source and what they say, in that order."""
    keys = np.stack([of, places["source"][chosen], places["what"][chosen]], axis=1)
    unique, which = np.unique(keys, axis=0, return_inverse=True)
    rows = np.bincount(which.reshape(-1), weights=places["rows"][chosen], minlength=len(unique))
    return zip(unique.tolist(), rows.astype(np.int64).tolist(), strict=True)


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a report's file; raise `AnalysisError` if it is none, or is damaged further on."""
    try:
        with arrow_file(path) as file, pq.ParquetFile(file) as parquet:
            yield parquet
    except FileNotFoundError:
        raise AnalysisError(f"{path}: missing; the report is incomplete, so replay the trace again") from None
    except PARQUET_ERRORS as error:
        raise AnalysisError(f"{path}: no Parquet file of a report ({error}); replay the trace again") from None


def require_columns(path: Path, file: pq.ParquetFile, names: Any) -> None:
    """Raise `AnalysisError` if a column is not there, or holds text where numbers belong."""
    kinds = {field.name: field.type for field in file.schema_arrow}
    again = "replay the trace again"
    missing = sorted(set(names) - set(kinds))
    if missing:
        raise AnalysisError(f"{path}: expected the columns of a report, {', '.join(missing)} missing; {again}")
    wrong = [name for name in names if name in NUMBERS and not pa.types.is_integer(kinds[name])]
    if wrong:
        raise AnalysisError(f"{path}: expected numbers in {', '.join(wrong)}, came {kinds[wrong[0]]}; {again}")


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
    names = (*_FIRST, *_OVER_ALL)
    joined = {name: np.concatenate([np.zeros(0, np.int64), *(part[name] for part in held)]) for name in names}
    folded = _folded(joined, shift)
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
    for name, fold in _OVER_ALL.items():
        found[name] = fold.reduceat(columns[name][order], starts)
    return found | {"key": key[starts].view(np.int64)}


def _bit(values: Int64Array) -> Int64Array:
    return np.where((values >= 0) & (values < 62), np.left_shift(1, np.clip(values, 0, 62)), 0)


def _learn_names(names: dict[int, str], requests: Int64Array, column: pa.Array) -> None:
    ids, first = np.unique(requests, return_index=True)
    new = [(i, at) for i, at in zip(ids.tolist(), first.tolist(), strict=True) if i not in names]
    texts = column.take(pa.array([at for _, at in new], pa.int64())).to_pylist()
    names.update((request_id, str(name or "")) for (request_id, _), name in zip(new, texts, strict=True))


def _ints(column: pa.Array, kinds: dict[str, int]) -> Int64Array:
    """A column as int64; texts as the numbers of `kinds`. Nulls, which no report has, stand for "none"."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        encoded = column.fill_null("").dictionary_encode()
        numbers = np.array([kinds.setdefault(text, len(kinds)) for text in encoded.dictionary.to_pylist()], np.int64)
        return numbers[encoded.indices.to_numpy()] if len(numbers) else np.zeros(0, np.int64)
    return np.ascontiguousarray(column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False))
