"""A forward's plans have room for it, at the very sizes at which there was just room for the one before."""

from types import SimpleNamespace

import numpy as np
import pytest
from kvcanary.kernels.constants import KvHashMode
from kvcanary.recorder.state.pools import GroupPool
from kvcanary.recorder.state.tables import StateTables
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.run.planning import Planner

WIDTH = 40
HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=4000, halves=("K",)),), tables=(StateTable(rows=80, width=WIDTH),)
)


@pytest.mark.parametrize("bs", [63, 64, 65, 66])
def test_each_request_of_a_large_batch_has_its_entries(bs: int) -> None:
    """Plans begin with room for 64 requests and 1,024 entries."""
    tables = StateTables(HEADER, backend="reference")
    tables.req_to_token[0][:] = np.arange(1, 80 * WIDTH + 1).reshape(80, WIDTH)
    pool = GroupPool(HEADER.groups[0], index=0, kv_hash_mode=KvHashMode.NONE)
    planner = Planner(HEADER, tables, backend="reference")
    rows, ones = np.arange(1, bs + 1), np.ones(bs, np.int64)
    for prefix in (1, 1024 // bs, 1024 // bs + 1):
        forward = SimpleNamespace(
            req_pool_indices=rows, request_ids=rows, prefix_lens=prefix * ones, extend_lens=ones, truth_lens=None,
            out_cache_loc=[rows], runner=0, event=1,
        )  # fmt: skip
        step = planner.plan(pool, forward)  # type: ignore[arg-type]
        assert step.reads == bs * prefix
        assert step.verify_plan.request_offsets[: bs + 1].tolist() == [prefix * r for r in range(bs + 1)]
        assert step.write_plan.offsets[: bs + 1].tolist() == list(range(bs + 1))
        expected = tables.req_to_token[0][rows, :prefix].ravel()
        assert step.verify_plan.slots[: step.reads].tolist() == expected.tolist()
