"""All tasks given to workers, and what comes of each; those that have a result already are not done again."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...recorder.remote import mapped
from .committing import Fleet, Row, failed, join_parts, replay_part, replay_task
from .tasks import Task
from .workers import LostError, Workers


@dataclass(slots=True, eq=False)
class _Given:
    """A task that workers are at; `parts` are the calls of its stretches, `ended` how many of them are done."""

    task: Task
    parts: list[Any] = field(default_factory=list)
    ended: int = 0


def results(tasks: Sequence[Task], fleet: Fleet, workers: Workers) -> Iterator[tuple[Task, list[Row]]]:
    """Yield each task with a row for each of its recordings, as they come; what fails is a row with an error."""
    # (whose, the part; the whole for None), each to be given as soon as there is room
    waiting = deque((given, part) for given in map(_Given, tasks) for part in (given.task.parts or (None,)))
    under_way: dict[Any, _Given] = {}
    while waiting or under_way:
        while waiting and workers.room(waiting[0][0].task.memory_bytes):
            given, part = waiting.popleft()
            task = given.task
            act, what = (replay_part, part) if part is not None else (replay_task, task)
            call = workers.submit(act, what, fleet, memory_bytes=task.memory_bytes)
            under_way[call] = given
            if part is not None:
                given.parts.append(call)
        for call in workers.done():
            given = under_way.pop(call)
            task = given.task
            given.ended += 1
            if given.ended < len(task.parts):
                continue
            try:
                if given.ended == len(task.parts):
                    joining = workers.submit(join_parts, task, fleet, *given.parts, memory_bytes=task.memory_bytes)
                    under_way[joining] = given
                    continue
                rows = workers.result(call)
            except LostError as error:
                rows = failed(task, str(error))
            yield task, rows


def recalled(tasks: Sequence[Task], fleet: Fleet) -> tuple[list[Row], list[Task]]:
    """Return the rows of what has a result already, and the tasks that have none; raise `OSError`."""
    there = fleet.keys()
    known = [task for task in tasks if task.key in there]
    rows: list[Row] = []
    for task, found in zip(known, mapped(fleet.committed, [fleet.place(task.key) for task in known]), strict=True):
        if found is None:
            there.discard(task.key)
        rows += found or []
    return rows, [task for task in tasks if task.key not in there]
