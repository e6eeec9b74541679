"""Faults x configurations x seeds, over as many processes as asked for: a row each, in a file that a later call goes on with."""

import hashlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ... import __version__
from ...recorder.files import replacing
from ...recorder.process.endings import ignore_endings
from .faults import FAULTS
from .trial import Trial, judge, run_trial

CLEAN: Final = "clean"
SAVE_EVERY_S: Final = 15.0
_META: Final = b"kvcanary_lab"
Key = tuple[str, str, int]
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


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
    """Return the rows of an earlier call, none without a file, or with `force` if it is of another build."""
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


def plan_trials(*, faults: Iterable[str], configs: Iterable[str], seeds: int, clean_seeds: int) -> list[Key]:
    """Return what is to be tried: `seeds` trials of each fault, in turns over its configurations, and clean ones."""
    chosen, faults = list(dict.fromkeys(configs)), dict.fromkeys(faults)
    planned: list[Key] = []
    for fault in faults:
        mine = [name for name in FAULTS[fault].configs if name in chosen]
        planned += [(fault, mine[seed % len(mine)], seed) for seed in range(seeds) if mine]
    planned += [(CLEAN, chosen[seed % len(chosen)], seed) for seed in range(clean_seeds) if chosen]
    return planned


def run_matrix(
    planned: list[Key],
    output: Path,
    *,
    jobs: int,
    force: bool = False,
    on_progress: Callable[[int, int, Row | None], None] = lambda _done, _total, _row: None,
) -> list[Row]:
    """Run what is planned and not yet in `output`, and return all planned rows, in their order; raise `ResultsError`.

    `output` is written anew every few seconds and at the end, also where Ctrl-C ends it early; rows of earlier calls
    that are not planned now stay in it.
    """
    rows = {row.key: row for row in load(output, force=force)}
    # Where the lab itself failed, as on a full disk, it is tried again.
    todo = [key for key in planned if key not in rows or rows[key].error]
    done = len(planned) - len(todo)
    on_progress(done, len(planned), None)
    saved = time.monotonic()
    try:
        for row in as_they_come(try_one, todo, jobs):
            rows[row.key] = row
            done += 1
            on_progress(done, len(planned), row)
            if time.monotonic() - saved > SAVE_EVERY_S:
                save(output, list(rows.values()))
                saved = time.monotonic()
    finally:
        save(output, list(rows.values()))
    return [rows[key] for key in planned]


def try_one(key: Key) -> Row:
    """Run and judge one trial; what fails in the lab itself stands in the row."""
    begin = time.perf_counter()
    fault, config, seed = key
    trial = Trial(fault=None if fault == CLEAN else FAULTS[fault], config=config, seed=seed)
    try:
        with tempfile.TemporaryDirectory(prefix="kvcanary-lab-") as folder:
            outcome = run_trial(trial, Path(folder) / "trace")
            found = judge(trial, outcome)
    except Exception as error:  # noqa: BLE001  # one trial's failure must not end an hour's work
        return Row(fault=fault, config=config, seed=seed, error=f"{type(error).__name__}: {error}")
    effect, first = outcome.effect, found.first
    known: dict[str, Any] = {name: getattr(outcome, name) for name in ("injected_forward", "broke_down", "forwards")}
    if effect is not None:
        known |= {"effect": effect.kind, "effect_forward": effect.forward}
    if first is not None:
        known |= {"detected": True, "detected_by": first.by, "first_detection_forward": first.forward}
        known["delay"] = first.tick - effect.tick if effect is not None else None
    return Row(
        fault=fault,
        config=config,
        seed=seed,
        injected=outcome.injected_forward >= 0,
        **known,
        reasons=", ".join(found.reasons),
        false_positive=", ".join(found.unfounded),
        seconds=time.perf_counter() - begin,
    )


def as_they_come(function: Callable[[_Task], _Result], todo: Sequence[_Task], jobs: int) -> Iterator[_Result]:
    """Yield a module's function's results: with one job here and in order, else by so many processes, in any order."""
    if jobs == 1 or len(todo) < 2:
        yield from map(function, todo)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context, initializer=ignore_endings) as pool:
        try:
            waiting = list(reversed(todo))
            running = {pool.submit(function, waiting.pop()) for _ in range(min(2 * jobs, len(waiting)))}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    if waiting:
                        running.add(pool.submit(function, waiting.pop()))
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
