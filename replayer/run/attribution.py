"""From a kernel's violation rows to whose they are: request, expected position, last writer."""

import numpy as np
import numpy.typing as npt

from ...kernels.ops.plan.reference import VerifyPlan, WritePlan
from ...kernels.ops.violation_log import ViolationLog
from ...recorder.state.forward import Forward
from ...recorder.state.pools import Endpoint, GroupPool
from ..report.merged.launch_order import first_places
from ..report.violations import LaunchViolations
from .sweep import Sweep

Int64Array = npt.NDArray[np.int64]

_SLOT_FIELD = 1
_AUX_FIELD = 6


def verify_violations(
    log: ViolationLog, *, plan: VerifyPlan, forward: Forward, pool: GroupPool, endpoint: Endpoint, half: str
) -> LaunchViolations:
    """Return the violations that a verify launch left in `log`."""
    rows, entries = log.rows[: log.num_rows].copy(), log.entries[: log.num_rows]
    requests = np.searchsorted(plan.request_offsets[1 : len(forward.request_ids) + 1], entries, side="right")
    return _attributed(
        rows,
        requests,
        forward,
        pool,
        endpoint,
        half,
        expected_positions=plan.expected_positions[entries],
        writers=pool.last_writers(rows[:, _SLOT_FIELD]),
    )


def sweep_violations(
    log: ViolationLog, *, plan: VerifyPlan, sweep: Sweep, pool: GroupPool, half: str
) -> LaunchViolations:
    """Return the violations that a sweep launch left in `log`; no request reads what it looks at."""
    rows, entries = log.rows[: log.num_rows].copy(), log.entries[: log.num_rows]
    nobody = np.full(len(rows), -1, dtype=np.int64)
    return LaunchViolations(
        event=sweep.event,
        forward=sweep.forward,
        time_ns=sweep.time_ns,
        mode="sweep",
        runner=sweep.runner,
        group=pool.index,
        endpoint="SWEEP",
        half=half,
        rows=rows,
        request_ids=nobody,
        req_pool_indices=nobody,
        expected_positions=plan.expected_positions[entries],
        writers=pool.last_writers(rows[:, _SLOT_FIELD]),
        places=first_places(np.stack([plan.slots, plan.expected_positions], axis=1))[entries],
    )


def write_violations(
    log: ViolationLog, *, plan: WritePlan, forward: Forward, pool: GroupPool, endpoint: Endpoint, half: str
) -> LaunchViolations:
    """Return the violations that a write launch left in `log`; the writer is this very forward."""
    rows, tokens = log.rows[: log.num_rows].copy(), log.entries[: log.num_rows]
    requests = np.searchsorted(plan.offsets[1 : len(forward.request_ids) + 1], tokens, side="right")
    writers = np.empty((len(rows), 3), dtype=np.int64)
    writers[:, 0], writers[:, 1] = forward.event, forward.forward
    writers[:, 2] = forward.request_ids[requests]
    return _attributed(
        rows,
        requests,
        forward,
        pool,
        endpoint,
        half,
        expected_positions=rows[:, _AUX_FIELD],  # expected_aux of a write row is a position
        writers=writers,
    )


def _attributed(
    rows: Int64Array,
    requests: npt.NDArray[np.intp],
    forward: Forward,
    pool: GroupPool,
    endpoint: Endpoint,
    half: str,
    *,
    expected_positions: Int64Array,
    writers: Int64Array,
) -> LaunchViolations:
    return LaunchViolations(
        event=forward.event,
        forward=forward.forward,
        time_ns=forward.time_ns,
        mode=forward.mode,
        runner=forward.runner,
        group=pool.index,
        endpoint=endpoint,
        half=half,
        rows=rows,
        request_ids=forward.request_ids[requests],
        req_pool_indices=forward.req_pool_indices[requests],
        expected_positions=expected_positions,
        writers=writers,
        places=requests.astype(np.int64, copy=False),
    )
