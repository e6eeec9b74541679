"""A request's length goes back without its having started over.

Invariant: from one forward of the target to the next, a request's prefix is as long as prefix and tokens of the one
before it; after a target-verify forward, at least one token longer than its prefix. Evidence: the two forwards.
Legitimate exceptions: a request that was retracted or is admitted anew starts over; a draft goes back to verify, and is
not judged; what a target-verify forward drafted and rejected was never length. Where the trace does not promise to tell
of retractions, a request may start over unseen, and only two forwards that both sampled are compared: a request has all
its tokens when it samples.
"""

import numpy as np

from ...recorder.state.history import ROW_END, ROW_EVENT, ROW_PREFIX, ROW_SAMPLED_END, ROW_VERIFY
from ..report.findings import Finding
from .check import Covered, HistoryCheck
from .reporting import forward_finding
from .view import ForwardView


class SeqLenBackwards(HistoryCheck):
    """Compares each target forward with the one before it on the same row."""

    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request whose length is less than it was."""
        history, forward = self._history, view.forward
        if forward.runner != 0 or not len(forward.req_pool_indices):
            return []
        last, same = history.rows.same(forward)
        same = same & (forward.request_ids >= 0)
        end = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        if history.complete:
            least = np.where(last[:, ROW_VERIFY] == 0, last[:, ROW_END], last[:, ROW_PREFIX] + 1)
            back = same & (forward.prefix_lens < least)
        else:
            sampled = forward.sampled_lens > 0 if len(forward.sampled_lens) else np.zeros(len(end), np.bool_)
            back = same & sampled & (end < last[:, ROW_SAMPLED_END]) & (last[:, ROW_VERIFY] == 0)
        return [
            forward_finding(
                "seq_len_backwards",
                forward,
                history.request_table,
                request=int(r),
                group=-1,
                position=int(forward.prefix_lens[r]),
                slot=-1,
                detail=(
                    f"goes on from a prefix of {forward.prefix_lens[r]} to {end[r]}; its forward before went from "
                    f"{last[r, ROW_PREFIX]} to {last[r, ROW_END]}"
                ),
                events=[int(last[r, ROW_EVENT]) - 1],
            )
            for r in np.flatnonzero(back)
        ]
