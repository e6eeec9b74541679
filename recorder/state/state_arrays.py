"""The arrays of the machine's state, by the names under which a keyframe holds them.

An array is seen as `[n, row_bytes] uint8`; a keyframe holds the rows that are not zero, or not what is said already.
docs/reference/trace-format.md lists the names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import record_words
from ...kernels.constants import RECORD_KV_HASH, KvHashMode
from .machine import MachineState
from .pools import GroupPool, Tier
from .table_use import TableUse, cells

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]
WORDS = 4  # of a canary record, the KV hash the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a keyframe holds of one array: runs of its rows, and where to read them.

    `array` is seen as a line of rows, `starts`, `counts` `[n] int64` the runs.
    """

    name: str
    array: npt.NDArray[Any]
    starts: Int64Array
    counts: Int64Array


def rows_in_use(state: MachineState, use: TableUse) -> Iterator[Rows]:
    """Yield what a keyframe holds of each array, in the order in which it must be put back."""
    tables = state.tables
    for number, (table, ends) in enumerate(zip(tables.req_to_token, use.ends, strict=True)):
        yield Rows(name=f"table.{number}", array=table.reshape(-1), **_runs(cells(ends, table.shape[1])))
    for number, lut in enumerate(tables.luts):
        yield _nonzero(f"lut.{number}", lut)
    if tables.truth is not None:
        runs = _runs(cells(use.truth_ends, tables.truth.shape[1]))
        yield Rows(name="truth", array=tables.truth.reshape(-1), **runs)
    for pool in state.pools:
        for tier, name in tiers(pool):
            yield from _tier_rows(pool, tier, name)
    history = state.history
    if history is None:
        return
    for number, (ledger, transfers) in enumerate(zip(history.ledger.rows, history.ledger.transfers, strict=True)):
        yield _nonzero(f"ledger.{number}", ledger)
        yield _nonzero(f"transfers.{number}", transfers)
    for number, last in enumerate(history.rows.last):
        yield _nonzero(f"rows.{number}", last)
    yield _nonzero("status", history.rows.status)
    yield _nonzero("samples", history.samples.last)
    ended = np.array(list(history.ended.items()), np.int64).reshape(-1, 2)
    for name, rows in (("ended", ended), ("dropped", history.dropped.rows())):
        yield Rows(name=name, array=rows, **_runs((np.zeros(1, np.int64), np.array([len(rows)]))))


def tiers(pool: GroupPool) -> list[tuple[Tier, str]]:
    """Return the tiers that have slots, with how their arrays' names begin."""
    named = [(pool.pool, f"pool.{pool.index}"), (pool.host, f"host.{pool.index}")]
    return [(tier, name) for tier, name in named if len(tier.writers)]


def _tier_rows(pool: GroupPool, tier: Tier, name: str) -> Iterator[Rows]:
    first, *others = pool.group.halves
    base = record_words(tier.tail[first], written=False)
    yield _nonzero(f"{name}.records", base)
    for half in others:
        words = record_words(tier.tail[half], written=False)
        hashes = words[:, RECORD_KV_HASH]
        yield _nonzero(f"{name}.hashes.{half}", hashes)
        yield _chosen(f"{name}.tail.{half}", words, _differ(words, base, hashes))
    for half in pool.group.halves:
        words = record_words(tier.head[half], written=False)
        yield _chosen(f"{name}.head.{half}", words, _differ(words, base, None))
    for half, whole in tier.whole_hashes.items():
        yield _nonzero(f"{name}.whole_hashes.{half}", whole)
    for number, data in enumerate(tier.kv):
        yield _nonzero(f"{name}.kv.{number}", data)
    yield _nonzero(f"{name}.writers", tier.writers)
    yield _nonzero(f"{name}.unknown", tier.unknown)


def places(state: MachineState, kv_hash_mode: KvHashMode) -> dict[str, npt.NDArray[Any]]:
    """Return where each array of a keyframe goes, but for those of `pool.G` and `host.G` records, `ended` and `dropped`."""
    found: dict[str, npt.NDArray[Any]] = {}
    tables = state.tables
    found |= {f"table.{number}": table.reshape(-1) for number, table in enumerate(tables.req_to_token)}
    found |= {f"lut.{number}": lut for number, lut in enumerate(tables.luts)}
    if tables.truth is not None:
        found["truth"] = tables.truth.reshape(-1)
    for pool in state.pools:
        for tier, name in tiers(pool):
            for half, records in tier.tail.items():
                found[f"{name}.hashes.{half}"] = record_words(records, written=True)[:, RECORD_KV_HASH]
                found[f"{name}.tail.{half}"] = record_words(records, written=True)
                if kv_hash_mode is KvHashMode.ALL:  # comes behind the other one, and takes its place
                    found[f"{name}.whole_hashes.{half}"] = found[f"{name}.hashes.{half}"]
                elif tier.whole_hashes:
                    found[f"{name}.whole_hashes.{half}"] = tier.whole_hashes[half]
            found |= {f"{name}.head.{half}": record_words(r, written=True) for half, r in tier.head.items()}
            found |= {f"{name}.kv.{number}": data for number, data in enumerate(tier.kv)}
            found[f"{name}.writers"] = tier.writers
            found[f"{name}.unknown"] = tier.unknown
    history = state.history
    if history is not None:
        found |= {f"ledger.{number}": rows for number, rows in enumerate(history.ledger.rows)}
        found |= {f"transfers.{number}": started for number, started in enumerate(history.ledger.transfers)}
        found |= {f"rows.{number}": last for number, last in enumerate(history.rows.last)}
        found["status"] = history.rows.status
        found["samples"] = history.samples.last
    return found


def _differ(words: Int64Array, base: Int64Array, hashes: Int64Array | None) -> npt.NDArray[np.bool_]:
    """Say which records are not the base's with KV hash `hashes`, `[n] int64`, or 0."""
    differ: npt.NDArray[np.bool_] = words[:, 0] != base[:, 0]
    for word in range(1, WORDS - 1):
        differ |= words[:, word] != base[:, word]
    if hashes is None:
        differ |= words[:, RECORD_KV_HASH] != 0
    return differ


def _nonzero(name: str, array: npt.NDArray[Any]) -> Rows:
    return _chosen(name, array, _any(array))


def _any(array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say which rows are not all zero; column by column, which numpy does many times faster than row by row."""
    if array.ndim == 1:
        return array != 0
    words = array
    if array.dtype == np.uint8 and array.flags.c_contiguous and array.shape[1] % 8 == 0:
        words = array.view(np.int64)
    found: npt.NDArray[np.bool_] = np.zeros(len(array), np.bool_)
    for column in range(words.shape[1]):
        found |= words[:, column] != 0
    return found


def _chosen(name: str, array: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> Rows:
    edges = np.flatnonzero(np.diff(mask.view(np.int8), prepend=0, append=0))
    return Rows(name=name, array=array, starts=edges[::2], counts=edges[1::2] - edges[::2])


def _runs(found: tuple[Int64Array, Int64Array]) -> dict[str, Int64Array]:
    return {"starts": found[0], "counts": found[1]}
