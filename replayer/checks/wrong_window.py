"""A forward reads fewer or more positions of its prefix than its sliding pool group's window has.

Invariant: of a prefix, a forward reads the last `window` positions, and may name the slot of the one before, which is
their predecessor in the chain. Evidence: the forward; the recorder notes what was read where that is something else.
Legitimate exceptions: engines that show a block table, of which nobody knows how much attention reads.
"""

from ..report.findings import Finding
from .check import Covered, HistoryCheck
from .reporting import forward_finding
from .view import ForwardView


class WrongWindow(HistoryCheck):
    """Tells of the reads that the recorder found to be other than the window's."""

    covered = Covered.COMPILED  # which stops in front of a forward that has such a read

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that reads other positions than its group's window."""
        forward, findings = view.forward, []
        for group, request, start, count in () if forward.windows is None else forward.windows.tolist():
            window = self._history.header.groups[group].window
            prefix = int(forward.prefix_lens[request])
            findings.append(
                forward_finding(
                    "wrong_window",
                    forward,
                    self._history.request_table,
                    request=request,
                    group=group,
                    position=start,
                    slot=-1,
                    detail=f"reads positions {start} to {start + count - 1} of a prefix of {prefix}, the window of {window} "
                    f"begins at {max(prefix - window, 0)}",
                )
            )
        return findings
