"""What may not be judged of a runner some of whose columns are derived: worked out by the recorder, not observed.

The forwards are replayed as ever, and what is found by means of such a value is dropped where it would go into the report,
whatever found it. docs/reference/replay.md has the table.
"""

import dataclasses
from typing import Final

from ...kernels.constants import FailReason
from ...recorder.trace.header import TraceHeader
from ..checks import FINDING_KINDS
from ..report.findings import Finding
from ..report.violations import LaunchViolations

_CHAIN: Final = FailReason.VERIFY_CHAIN_HASH
_EVERY_REASON: Final = FailReason(sum(FailReason))
# What the replay itself did not do, whatever the engine was given.
_ALWAYS: Final = frozenset({"launch_missing"})

# What is found by means of columns, by the beginning of their names, and so not judged where one of them is derived. By
# means of every other column, the rows, lengths and slots written among them, everything is found.
_ATTENTION: Final = frozenset(name for name in FINDING_KINDS if name.startswith("attention"))
_READS: Final = (
    _EVERY_REASON & ~FailReason.WRITE_TOKEN,
    _ATTENTION
    | frozenset(
        {
            *("read_after_free", "read_of_foreign_slot", "hit_never_written", "hit_differs", "seq_len_backwards"),
            *("input_not_sampled", "input_not_truth", "position_not_place", "swa_mapping_stale", "ranks_disagree"),
            *("slot_out_of_pool", "entry_out_of_table", "swa_lut_out_of_range"),
        }
    ),
)
_FOLLOWS: Final[dict[str, tuple[FailReason, frozenset[str]]]] = {
    "input_ids": (
        _CHAIN | FailReason.VERIFY_TOKEN | FailReason.WRITE_TOKEN,
        frozenset({"input_not_sampled", "input_not_truth", "hit_differs", "ranks_disagree"}),
    ),
    "positions": (
        # The hash oracle's token is that of the position.
        _CHAIN | FailReason.VERIFY_POSITION | FailReason.WRITE_POSITION | FailReason.WRITE_TOKEN,
        frozenset({"position_not_place", "hit_differs", "ranks_disagree"}),
    ),
    "prefix_lens": _READS,
    "table_": _READS,
    "lut_": _READS,
    "truth_": (FailReason.VERIFY_TOKEN, frozenset({"input_not_truth", "hit_differs"})),
    "sampled_": (FailReason(0), frozenset({"input_not_sampled"})),
    "kv_change_": (FailReason.VERIFY_KV_HASH, frozenset({"write_lost"})),
    "attention_": (FailReason(0), _ATTENTION),
}


class Derived:
    """Drops what may not be judged of each runner of a trace; `nothing_left` where that is all of every runner."""

    def __init__(self, header: TraceHeader) -> None:
        self._reasons: dict[int, int] = {}
        self._kinds: dict[int, frozenset[str]] = {}
        for index, runner in enumerate(header.runners):
            if runner.derived:
                self._reasons[index], self._kinds[index] = _not_judged(runner.derived)
        self.nothing_left = len(self._reasons) == len(header.runners) and all(
            reasons == _EVERY_REASON for reasons in self._reasons.values()
        )

    def violations(self, launch: LaunchViolations) -> LaunchViolations:
        """Return what is left of a launch's violations: rows without a reason are gone."""
        reasons = self._reasons.get(launch.runner, 0)
        if not reasons:
            return launch
        rows = launch.rows.copy()
        rows[:, 7] &= ~reasons
        return dataclasses.replace(launch, rows=rows).take(rows[:, 7] != 0)

    def findings(self, findings: list[Finding]) -> list[Finding]:
        """Return the findings that may be judged."""
        if not self._kinds:
            return findings
        return [one for one in findings if one.kind not in self._kinds.get(one.runner, ())]


def _not_judged(columns: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    everything = (_EVERY_REASON, frozenset(FINDING_KINDS) - _ALWAYS)
    reasons, kinds = FailReason(0), frozenset[str]()
    for column in columns:
        more, others = next((found for begin, found in _FOLLOWS.items() if column.startswith(begin)), everything)
        reasons, kinds = reasons | more, kinds | others
    return int(reasons), kinds
