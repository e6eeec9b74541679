"""Launches of the canary's verify and write kernels on a pool's buffers, with the counters of each launch tag."""

from collections.abc import Callable
from typing import Any

import numpy as np

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

_SLOT_FIELD = 1
_AUX_FIELD = 6


class Launcher:
    """Runs launches, each into a log that has room for everything it may find.

    `slot_counters` and `kernel_counters` are `[12] int64`, the canary's own health counters by launch tag. A log that is
    returned is the launcher's own and good until the next launch.
    """

    def __init__(self, *, backend: str) -> None:
        self.slot_counters: Int64Array = np.zeros(len(LaunchTag), dtype=np.int64)
        self.kernel_counters: Int64Array = np.zeros(len(LaunchTag), dtype=np.int64)
        self._backend = backend
        self._log = ViolationLog.allocate(1024)

    def verify(
        self, endpoint: Endpoint, half: str, pool: GroupPool, plan: VerifyPlan, *, check_tokens: bool
    ) -> ViolationLog:
        """Verify a buffer against a plan."""
        capacity = int(plan.num_valid[0])
        return self._launch(verify, endpoint, half, pool, capacity, plan=plan, check_tokens=check_tokens)

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
        return self._launch(
            write,
            endpoint,
            half,
            pool,
            2 * forward.num_tokens,
            plan=plan,
            input_ids=forward.input_ids,
            positions=forward.positions,
            out_cache_loc=slots,
            expected_tokens=expected_tokens,
            # Nobody but the chain knows better than the engine where a token belongs.
            expected_positions=None if expected_tokens is None else forward.positions,
            chain_step_assert=True,
        )

    def _launch(
        self, op: Callable[..., None], endpoint: Endpoint, half: str, pool: GroupPool, capacity: int, **given: Any
    ) -> ViolationLog:
        """Launch on a buffer: HEAD without KV hash, TAIL and SWEEP on the TAIL buffer with it."""
        if capacity > len(self._log.entries):
            self._log = ViolationLog.allocate(2 * capacity)
        self._log.clear()
        tag, head = launch_tag(endpoint, half, pool.group.kind), endpoint == "HEAD"
        op(
            canary=(pool.pool.head if head else pool.pool.tail)[half],
            tag=tag,
            sources=() if head else pool.sources[half],
            kv_hash_mode=KvHashMode.NONE if head else pool.kv_hash_mode,
            violations=self._log,
            slot_counter=self.slot_counters[tag : tag + 1],
            kernel_counter=self.kernel_counters[tag : tag + 1],
            backend=self._backend,
            **given,
        )
        return self._log


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
