"""Which executor steps a replay, and which compiled pass takes what is ordinary past it."""

import logging

from ...kernels.constants import KvHashMode
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from ..checks import CHECK_NAMES, Covered, covered_by, make_checks
from ..report.report import ReportSinks, ResultCollector
from ..report.summary import Summary
from ..run.health import Health
from ..run.settings import ReplaySettings
from .incremental.compiled_pass import CompiledPass
from .incremental.executor import IncrementalExecutor
from .incremental.state_arrays import covers, rows_covered
from .stepwise import ExecutorInput, StepwiseExecutor

_log = logging.getLogger("kvcanary")


def make_executor(
    header: TraceHeader,
    settings: ReplaySettings,
    *,
    kv_hash_mode: KvHashMode,
    request_table: RequestTable,
    results: ResultCollector,
) -> StepwiseExecutor:
    """Return the executor that the settings name, or the stepwise one if a check asks for that; raise `MemoryError` without room."""
    uncovered = [name for name, ways in covered_by(settings.checks).items() if ways < Covered.INCREMENTAL]
    if uncovered and (settings.device != "cpu" or settings.executor != "stepwise"):
        _log.info(
            "replaying step by step on the CPU: %s does not say that it is covered otherwise", ", ".join(uncovered)
        )
    given = ExecutorInput(
        header=header,
        kv_hash_mode=kv_hash_mode,
        backend=settings.backend,
        request_table=request_table,
        results=results,
        checks=make_checks(settings.checks, header=header, request_table=request_table, backend=settings.backend),
    )
    if settings.device != "cpu" and not uncovered:
        from .device.executor import DeviceExecutor  # which needs torch

        at_once = settings.merges_rows or settings.fail_fast or settings.max_violations is not None
        return DeviceExecutor(given, device=settings.device, at_once=at_once)
    kind = IncrementalExecutor if settings.executor == "interval" and not uncovered else StepwiseExecutor
    return kind(given)


def make_pass(
    executor: StepwiseExecutor,
    settings: ReplaySettings,
    *,
    health: Health,
    summary: Summary,
    request_ids: set[int],
    sinks: ReportSinks,
    compared: bool,
) -> CompiledPass | None:
    """Return the compiled pass of an executor; None if it has none, or if the chosen checks do not let it take events past them.

    `compared`: whether every forward is another rank's, too. It stops where any of its own checks finds something.
    """
    ways, history, checks = covered_by(settings.checks), executor.history, executor.checks
    if not set(CHECK_NAMES) <= set(ways) or min(ways.values()) is not Covered.COMPILED:
        return None
    if compared or settings.max_violations == 0 or settings.backend != "cpu" or not covers(executor.header):
        return None
    if not isinstance(executor, IncrementalExecutor) or history is None or checks is None:
        return None
    if not rows_covered(executor, history):
        return None
    return CompiledPass(executor, history, checks, health, summary, request_ids, sinks.merging)
