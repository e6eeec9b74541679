"""Launches of the canary's verify and write kernels on a pool's buffers, with the counters of each launch tag."""

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...kernels.constants import KvHashMode, LaunchTag
from ...kernels.ops.plan.reference import VerifyPlan, WritePlan
from ...kernels.ops.verify.reference import verify
from ...kernels.ops.violation_log import ViolationLog
from ...kernels.ops.write.reference import write
from ...recorder.state.forward import Forward
from ...recorder.state.pools import Endpoint, GroupPool, launch_tag
from ..report.merged.turns import first_places
from ..report.violations import LaunchViolations
from .sweep import Sweep

NUM_TAGS = len(LaunchTag)


class Launcher:
    """Runs launches, each into a log that has room for everything it may find.

    `slot_counters` and `kernel_counters` are `[12] int64`, the canary's own health counters by launch tag.
    """

    def __init__(self, *, backend: str) -> None:
        self.slot_counters: Int64Array = np.zeros(NUM_TAGS, dtype=np.int64)
        self.kernel_counters: Int64Array = np.zeros(NUM_TAGS, dtype=np.int64)
        self._backend = backend
        self._log = ViolationLog.allocate(1024)

    def verify(
        self, endpoint: Endpoint, half: str, pool: GroupPool, plan: VerifyPlan, *, check_tokens: bool
    ) -> ViolationLog:
        """Verify a buffer against a plan: HEAD without KV hash, TAIL and SWEEP the TAIL buffer with it.

        The log is the launcher's own and good until the next launch.
        """
        tag = launch_tag(endpoint, half, pool.group.kind)
        log = self._cleared_log(int(plan.num_valid[0]))
        head = endpoint == "HEAD"
        verify(
            canary=(pool.pool.head if head else pool.pool.tail)[half],
            tag=tag,
            plan=plan,
            check_tokens=check_tokens,
            sources=() if head else pool.sources[half],
            kv_hash_mode=KvHashMode.NONE if head else pool.kv_hash_mode,
            violations=log,
            slot_counter=self.slot_counters[tag : tag + 1],
            kernel_counter=self.kernel_counters[tag : tag + 1],
            backend=self._backend,
        )
        return log

    def write(
        self,
        endpoint: Endpoint,
        half: str,
        pool: GroupPool,
        plan: WritePlan,
        forward: Forward,
        *,
        slots: Int64Array,
        expected_tokens: Int64Array | None,
    ) -> ViolationLog:
        """Write a forward's records; `expected_tokens` `[T] int64` turns the write-input assert on."""
        tag = launch_tag(endpoint, half, pool.group.kind)
        log = self._cleared_log(2 * forward.num_tokens)
        head = endpoint == "HEAD"
        write(
            canary=(pool.pool.head if head else pool.pool.tail)[half],
            tag=tag,
            plan=plan,
            input_ids=forward.input_ids,
            positions=forward.positions,
            out_cache_loc=slots,
            expected_tokens=expected_tokens,
            # Nobody but the chain knows better than the engine where a token belongs.
            expected_positions=None if expected_tokens is None else forward.positions,
            chain_step_assert=True,
            sources=() if head else pool.sources[half],
            kv_hash_mode=KvHashMode.NONE if head else pool.kv_hash_mode,
            violations=log,
            slot_counter=self.slot_counters[tag : tag + 1],
            kernel_counter=self.kernel_counters[tag : tag + 1],
            backend=self._backend,
        )
        return log

    def _cleared_log(self, capacity: int) -> ViolationLog:
        if capacity > len(self._log.entries):
            self._log = ViolationLog.allocate(2 * capacity)
        self._log.clear()
        return self._log


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
    """Return the violations that a sweep launch left in `log`; no request reads what it verifies."""
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
