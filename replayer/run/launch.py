"""What a launch found, with what the trace knows about each row."""

import numpy as np

from ...kernels.ops.plan.reference import VerifyPlan, WritePlan
from ...kernels.ops.violation_log import ViolationLog
from ...recorder.state.forward import Forward
from ...recorder.state.pools import Endpoint, GroupPool
from ..report.merged.turns import first_places
from ..report.violations import LaunchViolations
from .sweep import Sweep

_SLOT_FIELD = 1
_AUX_FIELD = 6


def launch_violations(
    log: ViolationLog,
    plan: VerifyPlan | WritePlan,
    what: Forward | Sweep,
    pool: GroupPool,
    endpoint: Endpoint,
    half: str,
) -> LaunchViolations:
    """Return the violations that a launch left in `log`; no request reads what a sweep verifies."""
    rows, entries = log.rows[: log.num_rows].copy(), log.entries[: log.num_rows]
    if isinstance(what, Sweep):
        request_ids = req_pool_indices = np.full(len(rows), -1, dtype=np.int64)
    else:
        offsets = plan.offsets if isinstance(plan, WritePlan) else plan.request_offsets
        places = np.searchsorted(offsets[1 : len(what.request_ids) + 1], entries, side="right").astype(np.int64)
        request_ids, req_pool_indices = what.request_ids[places], what.req_pool_indices[places]
    if isinstance(plan, WritePlan):  # the writer is this very forward, and expected_aux of such a row is a position
        expected_positions = rows[:, _AUX_FIELD]
        writers = np.stack([np.full(len(rows), what.event), np.full(len(rows), what.forward), request_ids], axis=1)
    else:
        expected_positions, writers = plan.expected_positions[entries], pool.last_writers(rows[:, _SLOT_FIELD])
        if isinstance(what, Sweep):
            places = first_places(np.stack([plan.slots, plan.expected_positions], axis=1))[entries]
    return LaunchViolations(
        event=what.event,
        forward=what.forward,
        time_ns=what.time_ns,
        mode=what.mode,
        runner=what.runner,
        group=pool.index,
        endpoint=endpoint,
        half=half,
        rows=rows,
        request_ids=request_ids,
        req_pool_indices=req_pool_indices,
        expected_positions=expected_positions,
        writers=writers,
        places=places,
    )
