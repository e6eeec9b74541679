"""Faults that were injected on purpose, by their marks in a trace, and what each was found by first."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...kernels.constants import VIOLATION_FAIL_REASON, VIOLATION_SLOT, FailReason
from .findings import Finding
from .violations import LaunchViolations

_MOST: Final = 100  # marks that are listed, and held against what is found


class InjectedFaults:
    """Holds what is found against the marks of `kvcanary inject`, which name what each fault must be seen by.

    `listed` has one entry a fault: its `fault`, `forward`, `request`, `slot` as the mark says; `found_forward`, -1 for never,
    and `found_by`. Found is what is of the right kind, at the fault's slot or of one of its requests, from its forward on.
    """

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._open: list[tuple[dict[str, Any], dict[str, Any], int]] = []

    def mark(self, labels: dict[str, Any]) -> bool:
        """Take a mark, and return whether it is one that says what its fault must be seen by; past the first 100 that is all."""
        seen_by, ids = labels.get("seen_by"), labels.get("request_ids")
        numbers = [labels.get(name, default) for name, default in (("forward", None), ("slot", -1), ("count", 1))]
        if not isinstance(seen_by, list) or not isinstance(ids, list):
            return False
        if not all(isinstance(number, int) for number in (*numbers, *ids)):
            return False
        if len(self.listed) >= _MOST:
            return True
        fault = {"fault": str(labels.get("fault")), "forward": numbers[0], "request": str(labels.get("request", ""))}
        entry = fault | {"slot": numbers[1], "found_forward": -1, "found_by": ""}
        bits = sum(reason.value for reason in FailReason if reason.name in seen_by)
        self.listed.append(entry)
        self._open.append((entry, {**labels, "slot": numbers[1], "count": numbers[2]}, bits))
        return True

    def violations(self, launch: LaunchViolations) -> None:
        """Hold a launch's rows against the faults that are not found yet."""
        for entry, labels, bits in self._open:
            if launch.forward < entry["forward"]:
                continue
            wanted = (launch.rows[:, VIOLATION_FAIL_REASON] & bits) != 0
            slots = launch.rows[:, VIOLATION_SLOT]
            if entry["slot"] >= 0:
                wanted &= (slots >= entry["slot"]) & (slots < entry["slot"] + labels["count"])
                wanted &= launch.group == labels.get("group", launch.group)
            else:
                wanted &= np.isin(launch.request_ids, labels["request_ids"])
            if wanted.any():
                reasons = FailReason(int(launch.rows[int(np.argmax(wanted)), VIOLATION_FAIL_REASON]))
                names = [reason.name or "" for reason in FailReason if reason in reasons]
                self._found(entry, launch.forward, "+".join(names))

    def findings(self, findings: Sequence[Finding]) -> None:
        """Hold findings against the faults that are not found yet."""
        for entry, labels, _ in self._open:
            for finding in findings:
                mine = finding.request_id in labels["request_ids"]
                if finding.kind in labels["seen_by"] and mine and finding.forward >= entry["forward"]:
                    self._found(entry, finding.forward, finding.kind)
                    break

    def _found(self, entry: dict[str, Any], forward: int, by: str) -> None:
        if 0 <= entry["found_forward"] <= forward:
            return
        # What was sampled may be told of later than what came of it: an earlier forward may follow, but in the fault's own.
        entry.update(found_forward=forward, found_by=by)
        if forward == entry["forward"]:
            self._open = [one for one in self._open if one[0] is not entry]
