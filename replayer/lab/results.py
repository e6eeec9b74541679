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
    """One trial.

    Attributes:
        fault: the fault's name, "clean" for a run without one.
        config: the engine configuration.
        seed: of engine, workload and fault.
        injected: whether the fault happened.
        injected_forward: the forward that came next when it did; -1 where it did not.
        effect: what the first wrong thing was that a forward read or was fed, "" where there was none.
        effect_forward: that forward.
        detected: whether the replay reported anything at or after the injection.
        detected_by: the first thing reported, a violation's reasons and launch or a finding's kind.
        reasons: everything reported, by name, joined by ", ".
        first_detection_forward: the forward at which, or before which, that was; -1 where nothing was.
        delay: forwards, on both sides of a pair, from the effect to the first detection; None without both. Not
            positive: seen in time.
        false_positive: what was reported of a clean run, of a fault that is none, or before the injection.
        broke_down: how the engine gave up on its damaged books, if it did.
        error: how the lab itself failed, if it did.
        forwards: forwards recorded.
        seconds: how long the trial took.
    """

    fault: str
    config: str
    seed: int
    injected: bool = False
    injected_forward: int = -1
    effect: str = ""
    effect_forward: int = -1
    detected: bool = False
    detected_by: str = ""
    reasons: str = ""
    first_detection_forward: int = -1
    delay: int | None = None
    false_positive: str = ""
    broke_down: str = ""
    error: str = ""
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
    """Return the rows of an earlier call, none where there is no file.

    Args:
        path: the results file.
        force: start anew where the file is of another build.

    Raises:
        ResultsError: the file is of another build, or no results file.
    """
    if not path.exists():
        return []
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: expected a results file of kvcanary lab matrix, {error}; name another") from None
    known = (table.schema.metadata or {}).get(_META)
    if known is None or table.schema.names != SCHEMA.names:
        raise ResultsError(f"{path}: expected a results file of kvcanary lab matrix, it is another table; name another")
    if json.loads(known)["build"] != build_id():
        if force:
            return []
        raise ResultsError(
            f"{path}: its results are of build {json.loads(known)['build']}, this is {build_id()}; name another file, or "
            "start anew with --force"
        )
    return [Row(**row) for row in table.to_pylist()]


def save(path: Path, rows: list[Row]) -> None:
    """Write all rows; whoever is interrupted meanwhile finds the file as it was before."""
    schema = SCHEMA.with_metadata({_META: json.dumps({"build": build_id()})})
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file)
