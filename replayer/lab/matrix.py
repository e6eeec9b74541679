"""Faults x configurations x seeds, over as many processes as asked for; goes on where an earlier call stopped."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, TypeVar

from ...recorder.process.endings import ignore_endings
from .faults import FAULTS
from .results import CLEAN, Row, load, save
from .trial import Trial, judge, run_trial

SAVE_EVERY_S: Final = 15.0
Key = tuple[str, str, int]
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def plan_trials(*, faults: Iterable[str], configs: Iterable[str], seeds: int, clean_seeds: int) -> list[Key]:
    """Return what is to be tried: `seeds` trials of each fault, in turns over its configurations, and clean ones.

    Faults that exist in none of `configs` are left out; what is named twice is tried once.
    """
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
    """Run what is planned and not yet in `output`, and return all planned rows, in their order.

    `output` is written anew every few seconds and at the end, also where Ctrl-C ends it early; rows of earlier calls
    that are not planned now stay in it.

    Raises:
        ResultsError: `output` is of another build, or something else.
        KeyboardInterrupt: after `output` is written.
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
    known: dict[str, Any] = {}
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
        injected_forward=outcome.injected_forward,
        **known,
        reasons=", ".join(found.reasons),
        false_positive=", ".join(found.unfounded),
        broke_down=outcome.broke_down,
        forwards=outcome.forwards,
        seconds=time.perf_counter() - begin,
    )


def as_they_come(function: Callable[[_Task], _Result], todo: Sequence[_Task], jobs: int) -> Iterator[_Result]:
    """Yield `function`'s result of each task, in any order; with one job, here and in order, else by so many processes.

    It must be a function of a module, so that another process finds it.
    """
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
