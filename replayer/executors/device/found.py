"""What the kernels found, step by step: rows of the logs, put in order and turned into the violations of each launch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....kernels.constants import VERIFY_KV_HASH, VIOLATION_FIELDS
from ....kernels.gpu import step
from ....recorder.state.forward import Forward
from ....recorder.state.pools import Endpoint, GroupPool, launch_tag
from ...report.violations import LaunchViolations

Int64Array = npt.NDArray[np.int64]
_VIOLATION = (
    step.FOUND_SLOT,
    step.FOUND_STORED_POSITION,
    step.FOUND_STORED_TOKEN,
    step.FOUND_EXPECTED_TOKEN,
    step.FOUND_PREV_HASH,
    step.FOUND_EXPECTED_HASH,
)
_WROTE = (
    step.WROTE_SLOT,
    step.WROTE_POSITION,
    step.WROTE_TOKEN,
    step.WROTE_EXPECTED,
    step.WROTE_CHAIN,
    step.WROTE_AUX,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the kernels made of one step.

    `reads` `[groups] int64` counts the prefix entries of each of the runner's groups, `stats` `[groups, STAT_WORDS]
    int64`; `verify`, `write` `[n, FOUND_WORDS] int64` are the rows of all groups, in the order of one launch.
    """

    reads: Int64Array
    stats: Int64Array
    written: int
    verify: Int64Array
    write: Int64Array


def in_order(rows: Int64Array, columns: tuple[int, ...]) -> Int64Array:
    """Return rows `[n, k] int64` sorted by columns, the most weighty first."""
    found: Int64Array = rows[np.lexsort([rows[:, column] for column in reversed(columns)])]
    return found


VERIFY_ORDER = (step.FOUND_STEP, step.FOUND_GROUP, step.FOUND_REQUEST, step.FOUND_POSITION)
WRITE_ORDER = (step.FOUND_STEP, step.FOUND_GROUP, step.WROTE_TOKEN_INDEX, step.WROTE_ORDER)


def verify_rows(
    found: Found, number: int, *, forward: Forward, pool: GroupPool, endpoint: Endpoint, half: str
) -> LaunchViolations | None:
    """Return what one verify launch of the runner's group `number` found, None for nothing."""
    rows = found.verify[found.verify[:, step.FOUND_GROUP] == number]
    reasons = rows[:, step.FOUND_REASON].copy()
    if endpoint != "HEAD":
        kv = (rows[:, step.FOUND_KV] >> pool.group.halves.index(half)) & 1
        reasons |= kv * VERIFY_KV_HASH
    failed = reasons != 0
    if not failed.any():
        return None
    rows = rows[failed]
    writers = rows[:, step.FOUND_WRITER : step.FOUND_WRITER + 3].copy()
    written = writers[:, 0] > 0
    writers[:, 0] -= 1
    writers[~written] = -1
    return _violations(
        rows,
        _VIOLATION,
        reasons[failed],
        rows[:, step.FOUND_POSITION].copy(),
        writers,
        forward=forward,
        pool=pool,
        endpoint=endpoint,
        half=half,
    )


def write_rows(
    found: Found, number: int, *, forward: Forward, pool: GroupPool, endpoint: Endpoint, half: str
) -> LaunchViolations | None:
    """Return what one write launch found, None for nothing; every buffer's is the same but for its tag."""
    rows = found.write[found.write[:, step.FOUND_GROUP] == number]
    if not len(rows):
        return None
    requests = rows[:, step.FOUND_REQUEST]
    writers = np.empty((len(rows), 3), np.int64)
    writers[:, 0], writers[:, 1] = forward.event, forward.forward
    writers[:, 2] = forward.request_ids[requests]
    return _violations(
        rows,
        _WROTE,
        rows[:, step.WROTE_REASON],
        rows[:, step.WROTE_AUX].copy(),
        writers,
        forward=forward,
        pool=pool,
        endpoint=endpoint,
        half=half,
    )


def _violations(
    rows: Int64Array,
    columns: tuple[int, ...],
    reasons: Int64Array,
    positions: Int64Array,
    writers: Int64Array,
    *,
    forward: Forward,
    pool: GroupPool,
    endpoint: Endpoint,
    half: str,
) -> LaunchViolations:
    made = np.empty((len(rows), VIOLATION_FIELDS), np.int64)
    made[:, 0] = launch_tag(endpoint, half, pool.group.kind)
    made[:, 1:-1] = rows[:, columns]
    made[:, -1] = reasons
    requests = rows[:, step.FOUND_REQUEST].copy()
    return LaunchViolations(
        event=forward.event,
        forward=forward.forward,
        time_ns=forward.time_ns,
        mode=forward.mode,
        runner=forward.runner,
        group=pool.index,
        endpoint=endpoint,
        half=half,
        rows=made,
        request_ids=forward.request_ids[requests],
        req_pool_indices=forward.req_pool_indices[requests],
        expected_positions=positions,
        writers=writers,
        places=requests,
    )
