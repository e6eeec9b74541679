"""How many workers a plan is shared out among, and what each of them gets."""

import os
from collections.abc import Sequence
from typing import Final

from ...kernels.sparse import free_memory_bytes
from ...recorder.state.pools import pool_bytes
from ..run.settings import ReplaySettings
from .jobs import Job, ReplayPlan, group_bytes
from .splitting import split_plan

# To load the libraries once more, in the server of the workers, takes about as long as some 200 MB of a trace.
WORTH_A_WORKER_BYTES: Final = 256 << 20
# One replay keeps one core and a half busy; stretches of one recording begin with its keyframe each.
WORTH_SPLITTING_CORES: Final = 4
_SHARE_OF_MEMORY: Final = 0.5


def shared_out(plan: ReplayPlan, settings: ReplaySettings, *, jobs: int | None) -> tuple[ReplayPlan, int]:
    """Return a plan for workers, recordings in segments split where there are more workers than recordings, and how many.

    Args:
        plan: what to replay.
        settings: how.
        jobs: how many workers the user wants; None for as many as pay, which is one on a GPU.
    """
    if jobs is None:
        if settings.device != "cpu":
            return plan, 1
        cores = usable_cores()
        split = split_plan(plan, settings, workers=cores) if cores >= WORTH_SPLITTING_CORES else plan
        jobs = default_jobs(split)
    plan = split_plan(plan, settings, workers=jobs)
    return plan, min(jobs, len(plan.groups))


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(plan: ReplayPlan) -> int:
    """Return how many workers pay for a plan's groups, and fit into memory; 1 for none at all."""
    sizes = sorted((group_bytes(group) for group in plan.groups), reverse=True)
    jobs = min(usable_cores(), len(sizes), sum(sizes) // WORTH_A_WORKER_BYTES)
    needed = sorted((_memory(group) for group in plan.groups), reverse=True)
    free = free_memory_bytes()
    while jobs > 1 and free is not None and sum(needed[:jobs]) > _SHARE_OF_MEMORY * free:
        jobs -= 1
    return max(1, jobs)


def _memory(group: Sequence[Job]) -> int:
    """Return about what a group's pools, tables and bookkeeping take at most."""
    return sum(2 * pool_bytes(job.recording.header) for job in group if job.recording.header is not None)
