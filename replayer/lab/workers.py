"""A function over many trials, in as many processes as asked for; each result as it comes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import TypeVar

from ...recorder.process.endings import ignore_endings

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def as_they_come(function: Callable[[_Task], _Result], todo: Sequence[_Task], jobs: int) -> Iterator[_Result]:
    """Yield `function`'s result of each task, in any order; with one job, here and in order.

    Args:
        function: of a module, so that another process finds it.
        todo: the tasks.
        jobs: processes at once.
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
