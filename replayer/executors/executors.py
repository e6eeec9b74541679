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
from .incremental.compiled_pass import CompiledPass, open_pass
from .incremental.executor import IncrementalExecutor
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
    request_table: RequestTable,
    request_ids: set[int],
    sinks: ReportSinks,
    compared: bool,
) -> CompiledPass | None:
    """Return the compiled pass of an executor, None if it has none; `compared`: whether every forward is another rank's, too."""
    return open_pass(
        executor,
        health,
        summary,
        request_table,
        request_ids,
        sinks.merging,
        every_check=_passes_by(settings.checks) and not compared and settings.max_violations != 0,
        backend=settings.backend,
    )


def _passes_by(checks: tuple[str, ...]) -> bool:
    """Whether a pass may take events past the chosen checks; it stops where any of its own finds something."""
    ways = covered_by(checks)
    return set(CHECK_NAMES) <= set(ways) and min(ways.values()) is Covered.COMPILED
