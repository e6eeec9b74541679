"""Which executor steps a replay, and which lane takes what is ordinary past it."""

from typing import TYPE_CHECKING

from ..kernels.constants import KvHashMode
from ..recorder.header import TraceHeader
from ..recorder.machine.requests import RequestBook
from .checks import CHECK_NAMES, make_checks
from .health import Health
from .interval.executor import IntervalExecutor
from .interval.lane import Lane, open_lane
from .report import ReportSinks
from .settings import ReplaySettings
from .stepwise import StepwiseExecutor
from .summary import Summary
from .takings import Takings

if TYPE_CHECKING:
    from .device.quiet import QuietLane


def make_executor(
    header: TraceHeader, settings: ReplaySettings, *, kv_hash_mode: KvHashMode, book: RequestBook, takings: Takings
) -> StepwiseExecutor:
    """Return the executor that the settings name; raise `MemoryError` where its pools and tables find no room."""
    checks = make_checks(settings.checks, header=header, book=book, backend=settings.backend)
    if settings.device != "cpu":
        from .device.executor import DeviceExecutor  # which needs torch

        return DeviceExecutor(
            header,
            kv_hash_mode=kv_hash_mode,
            backend=settings.backend,
            book=book,
            on_violations=takings.violations,
            on_findings=takings.findings,
            checks=checks,
            device=settings.device,
        )
    kind = IntervalExecutor if settings.executor == "interval" else StepwiseExecutor
    return kind(
        header,
        kv_hash_mode=kv_hash_mode,
        backend=settings.backend,
        book=book,
        on_violations=takings.violations,
        on_findings=takings.findings,
        checks=checks,
    )


def make_lane(
    executor: StepwiseExecutor,
    settings: ReplaySettings,
    *,
    health: Health,
    summary: Summary,
    book: RequestBook,
    request_ids: set[int],
    sinks: ReportSinks,
    compared: bool,
) -> "Lane | QuietLane | None":
    """Return the lane of an executor, None where it has none; `compared`: whether every forward is another rank's, too."""
    if settings.device != "cpu":
        from .device.quiet import open_quiet_lane

        alone = not settings.checks and not compared and sinks.merging is None
        return open_quiet_lane(executor, health, summary, request_ids, alone=alone)
    return open_lane(
        executor,
        health,
        summary,
        book,
        request_ids,
        sinks.merging,
        every_check=set(settings.checks) == set(CHECK_NAMES) and not compared and settings.max_violations != 0,
        backend=settings.backend,
    )
