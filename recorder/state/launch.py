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
from .forward import Forward
from .pools import Endpoint, GroupPool, launch_tag


class Launcher:
    """Runs launches, each into a log that has room for everything it may find. `slot_counters` and `kernel_counters`
    are `[12] int64`, the canary's own health counters by launch tag. A log that is returned is the launcher's own and
    good until the next launch.
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
        expected_tokens: Int64Array | None = None,
        asserts_steps: bool = False,
    ) -> ViolationLog:
        """Write a forward's records; `expected_tokens` `[T] int64` turns the write-input assert on."""
        return self._launch(
            write,
            endpoint,
            half,
            pool,
            (2 if asserts_steps or expected_tokens is not None else 0) * forward.num_tokens,
            plan=plan,
            input_ids=forward.input_ids,
            positions=forward.positions,
            out_cache_loc=slots,
            expected_tokens=expected_tokens,
            # Nobody but the chain knows better than the engine where a token belongs.
            expected_positions=None if expected_tokens is None else forward.positions,
            chain_step_assert=asserts_steps,
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
