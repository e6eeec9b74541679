"""Launches of the canary's verify and write kernels on a pool's buffers, with the counters of each launch tag."""

import numpy as np
import numpy.typing as npt

from ...kernels.constants import KvHashMode, LaunchTag
from ...kernels.ops.plan.reference import VerifyPlan, WritePlan
from ...kernels.ops.verify.reference import verify
from ...kernels.ops.violation_log import ViolationLog
from ...kernels.ops.write.reference import write
from ...recorder.state.forward import Forward
from ...recorder.state.pools import Endpoint, GroupPool, launch_tag

Int64Array = npt.NDArray[np.int64]
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
