"""The matrix's rows: one trial each, kept in a Parquet file that a later call of the same build goes on with."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from ... import __version__
from ...recorder.files import replacing

CLEAN: Final = "clean"
_META: Final = b"kvcanary_lab"


class ResultsError(Exception):
    """A results file that cannot be gone on with; `str()` says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial."""

    fault: str  # the fault's name, "clean" for a run without one
    config: str
    seed: int  # of engine, workload and fault
    injected: bool = False
    injected_forward: int = -1  # the forward that came next when the fault happened
    effect: str = ""  # what the first wrong thing was that a forward read or was fed
    effect_forward: int = -1
    detected: bool = False  # the replay reported something at or after the injection
    detected_by: str = ""  # the first thing reported, a violation's reasons and launch or a finding's kind
    reasons: str = ""  # everything reported, by name, joined by ", "
    first_detection_forward: int = -1  # the forward at which, or before which, that was
    delay: int | None = None  # forwards of all engines from effect to first detection; not positive: seen in time
    false_positive: str = ""  # what was reported of a clean run, of a fault that is none, or before the injection
    broke_down: str = ""  # how the engine gave up on its damaged books, if it did
    error: str = ""  # how the lab itself failed, if it did
    forwards: int = 0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, int]:
        """What was tried."""
        return self.fault, self.config, self.seed


_TYPES: Final = {str: pa.utf8(), int: pa.int64(), bool: pa.bool_(), float: pa.float64(), int | None: pa.int64()}
SCHEMA: Final = pa.schema([(item.name, _TYPES[item.type]) for item in fields(Row)])  # type: ignore[index]  # all types


@cache
def build_id() -> str:
    """Return what the results depend on: version and a digest of everything that records and replays."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder in ("kernels", "recorder", "replayer"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def load(path: Path, *, force: bool) -> list[Row]:
    """Return the rows of an earlier call, none if there is no file; with `force` none if it is of another build.

    Raises:
        ResultsError: the file is of another build, or no results file.
    """
    if not path.exists():
        return []
    expected = f"{path}: expected a results file of kvcanary lab matrix"
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{expected}, {error}; name another") from None
    known = (table.schema.metadata or {}).get(_META)
    if known is None or table.schema.names != SCHEMA.names:
        raise ResultsError(f"{expected}, it is another table; name another")
    build = json.loads(known)["build"]
    if build != build_id():
        if force:
            return []
        raise ResultsError(
            f"{path}: its results are of build {build}, this is {build_id()}; name another file, or start anew with --force"
        )
    return [Row(**row) for row in table.to_pylist()]


def save(path: Path, rows: list[Row]) -> None:
    """Write all rows; whoever is interrupted meanwhile finds the file as it was before."""
    schema = SCHEMA.with_metadata({_META: json.dumps({"build": build_id()})})
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file)
