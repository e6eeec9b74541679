"""Which executor steps a replay, and which compiled pass takes what is ordinary past it."""

import logging

from ...kernels.constants import KvHashMode
from ..checks import CHECK_NAMES, Covered, covered_by
from ..report.report import Results
from ..run.health import Health
from ..run.settings import ReplaySettings
from .incremental.compiled_pass import CompiledPass
from .incremental.executor import IncrementalExecutor
from .incremental.state_arrays import covers, rows_covered
from .stepwise import StepwiseExecutor

_log = logging.getLogger("kvcanary")


def make_executor(results: Results, settings: ReplaySettings, kv_hash_mode: KvHashMode) -> StepwiseExecutor:
    """Return the executor that the settings name, or the stepwise one if a check asks for that; raise `MemoryError` without room."""
    uncovered = [
        name for name, ways in covered_by(settings.checks, results.summary.header).items() if ways < Covered.INCREMENTAL
    ]
    if uncovered and (settings.device != "cpu" or settings.executor != "stepwise"):
        _log.info(
            "replaying step by step on the CPU: %s does not say that it is covered otherwise", ", ".join(uncovered)
        )
    kind: type[StepwiseExecutor] = StepwiseExecutor
    if settings.device != "cpu" and not uncovered:
        from .device.executor import DeviceExecutor  # which needs torch

        kind = DeviceExecutor
    elif settings.executor == "interval" and not uncovered:
        kind = IncrementalExecutor
    return kind(results, settings, kv_hash_mode)


def make_pass(
    executor: StepwiseExecutor, settings: ReplaySettings, health: Health, *, compared: bool
) -> CompiledPass | None:
    """Return the compiled pass of an executor; None if it has none, or if the chosen checks do not let it take events past them.

    `compared`: whether every forward is another rank's, too. It stops where any of its own checks finds something.
    """
    ways, history, checks = covered_by(settings.checks, executor.header), executor.history, executor.checks
    if not set(CHECK_NAMES) <= set(ways) or min(ways.values()) is not Covered.COMPILED:
        return None
    if compared or settings.max_violations == 0 or settings.backend != "cpu" or not covers(executor.header):
        return None
    if not isinstance(executor, IncrementalExecutor) or history is None or checks is None:
        return None
    return CompiledPass(executor, history, checks, health) if rows_covered(executor, history) else None
