"""A walk of the prefix cache as a verify plan for each pool group: what the canary's SWEEP launches check.

Every slot that the cache holds is verified in the TAIL buffer: chain, position and KV hash, tokens unchecked. A slot 0
stands for a sliding-window half that is gone and is passed over, as in every launch.
"""

from dataclasses import dataclass

import numpy as np

from ...kernels.ops.plan.reference import VerifyPlan
from ...recorder.state.forward import UnusableEventError
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from ..report.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep event, checked; `plans` holds one verify plan for each group of `runner`, by the group's index."""

    event: int
    forward: int
    time_ns: int
    runner: int
    plans: dict[int, VerifyPlan]
    mode: str = "sweep"


def read_sweep(view: EventView, header: TraceHeader) -> Sweep:
    """Return a sweep event's plans; raise `UnusableEventError` if its columns do not fit one another or the header."""
    runner = int(view.scalar("runner"))
    if not 0 <= runner < len(header.runners):
        raise UnusableEventError(f"runner {runner}, the header names {len(header.runners)}")
    names = ("group", "slot", "position", "prev", "locked")
    groups, slots, positions, prevs, _ = columns = [view.ints(f"sweep_{name}") for name in names]
    if len({len(column) for column in columns}) != 1:
        raise UnusableEventError("the sweep_* columns differ in length")
    mine = [index for index, group in enumerate(header.groups) if group.runner == runner]
    if not np.isin(groups, mine).all():
        raise UnusableEventError(f"sweep_group names a group that runner {runner} does not have")
    plans = {}
    for index in mine:
        chosen = groups == index
        count = int(chosen.sum())
        plans[index] = VerifyPlan(
            slots=slots[chosen],
            expected_tokens=np.full(count, -1, np.int64),
            expected_positions=positions[chosen],
            prev_slots=prevs[chosen],
            num_valid=np.array([count], np.int32),
            enable=np.ones(1, np.int32),
            request_offsets=np.array([0, count], np.int64),
        )
    return Sweep(
        event=view.number, forward=int(view.scalar("forward")), time_ns=view.time_ns, runner=runner, plans=plans
    )


def explain_sweep(sweep: Sweep, group: int, num_slots: int) -> list[Finding]:
    """Return a finding for the slots of a sweep that the pool does not have, none if it has all."""
    plan = sweep.plans[group]
    beyond = np.flatnonzero((plan.slots < 0) | (plan.slots >= num_slots) | (plan.prev_slots >= num_slots))
    if not len(beyond):
        return []
    first = int(beyond[0])
    detail = f"the prefix cache holds {len(beyond)} slots, or predecessors of slots, that the pool of {num_slots} does not have"
    return [
        Finding(
            kind="slot_out_of_pool",
            event=sweep.event,
            forward=sweep.forward,
            time_ns=sweep.time_ns,
            runner=sweep.runner,
            group=group,
            position=int(plan.expected_positions[first]),
            slot=int(plan.slots[first]),
            detail=detail,
        )
    ]
