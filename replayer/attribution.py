"""From a kernel's violation rows to rows that name forward, request, expected position and last writer."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..kernels.plan import VerifyPlan, WritePlan
from ..kernels.records import ViolationLog
from .forward import Forward
from .pools import Endpoint, GroupPool
from .violations import violation_table

Int64Array = npt.NDArray[np.int64]

_SLOT_FIELD = 1


@dataclass(slots=True)
class RequestBook:
    """The names of the requests seen so far, by their 64-bit id."""

    names: dict[int, str]
    prompt_lens: dict[int, int]

    def name(self, request_id: int) -> str:
        """Return a request's name, or its number where no request event named it."""
        return self.names.get(request_id) or (str(request_id) if request_id >= 0 else "")

    def name_column(self, request_ids: Int64Array) -> pa.Array:
        """Return the names of many requests."""
        unique, inverse = np.unique(request_ids, return_inverse=True)
        return pa.array([self.name(int(i)) for i in unique], type=pa.utf8()).take(pa.array(inverse))


def verify_violations(
    log: ViolationLog,
    *,
    plan: VerifyPlan,
    forward: Forward,
    pool: GroupPool,
    endpoint: Endpoint,
    half: str,
    book: RequestBook,
) -> pa.Table:
    """Return the violations that a verify launch left in `log`."""
    count = int(log.write_index[0])
    entries = log.entries[:count]
    requests = np.searchsorted(plan.request_offsets[1 : len(forward.request_ids) + 1], entries, side="right")
    return violation_table(
        log.rows[:count],
        _context(forward, pool, endpoint, half, requests, book)
        | {"expected_position": plan.expected_positions[entries]}
        | _writer_columns(log.rows[:count, _SLOT_FIELD], pool, book),
    )


def write_violations(
    log: ViolationLog,
    *,
    plan: WritePlan,
    forward: Forward,
    pool: GroupPool,
    endpoint: Endpoint,
    half: str,
    book: RequestBook,
) -> pa.Table:
    """Return the violations that a write launch left in `log`; the writer is this very forward."""
    count = int(log.write_index[0])
    requests = np.searchsorted(plan.offsets[1 : len(forward.request_ids) + 1], log.entries[:count], side="right")
    context = _context(forward, pool, endpoint, half, requests, book)
    return violation_table(
        log.rows[:count],
        context
        | {
            "expected_position": log.rows[:count, 6],  # expected_aux of a write row is a position
            "writer_event": forward.event,
            "writer_forward": forward.forward,
            "writer_request_id": context["request_id"],
            "writer_request": context["request"],
        },
    )


def _context(
    forward: Forward, pool: GroupPool, endpoint: Endpoint, half: str, requests: npt.NDArray[np.intp], book: RequestBook
) -> dict[str, object]:
    request_ids = forward.request_ids[requests]
    return {
        "event": forward.event,
        "forward": forward.forward,
        "time_ns": forward.time_ns,
        "mode": forward.mode,
        "runner": forward.runner,
        "group": pool.index,
        "endpoint": endpoint,
        "half": half,
        "request_id": request_ids,
        "request": book.name_column(request_ids),
        "req_pool_idx": forward.req_pool_indices[requests],
    }


def _writer_columns(slots: Int64Array, pool: GroupPool, book: RequestBook) -> dict[str, object]:
    writers = pool.pool.writers[slots]
    return {
        "writer_event": writers[:, 0],
        "writer_forward": writers[:, 1],
        "writer_request_id": writers[:, 2],
        "writer_request": book.name_column(writers[:, 2]),
    }
