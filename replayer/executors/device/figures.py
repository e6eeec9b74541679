"""How far sliding-window pools have diverged, where the device did the counting."""

import numpy as np
import numpy.typing as npt

from ....recorder.state.forward import Forward
from ....recorder.state.tables import StateTables
from ...run.divergence import SwaDivergence
from ...run.planning import GroupStep

Int64Array = npt.NDArray[np.int64]


class DeviceDivergence(SwaDivergence):
    """Takes the figures of the runner's groups from `counted` `[groups, 2] int64` where that is set."""

    counted: Int64Array | None = None

    def _count(self, step: GroupStep, forward: Forward, tables: StateTables) -> tuple[int, int]:
        if self.counted is None:
            return super()._count(step, forward, tables)
        mine = [index for index, group in enumerate(self._header.groups) if group.runner == forward.runner]
        none, other = self.counted[mine.index(step.pool.index)].tolist()
        return none, other
