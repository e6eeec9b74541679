"""History checks: mistakes that no canary record shows, found in the order of events.

Each module holds checks of one subject, and each check registers itself. What `HistoryCheck` says of itself is all that is
known of it elsewhere: a module that is added here needs no other line.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from typing import Final

from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from ..report.findings import OTHER_KINDS
from .check import CHECKS, CheckSet, Covered, HistoryCheck
from .history import History

__all__ = ["CHECKS", "CHECK_NAMES", "FINDING_KINDS", "Covered", "HistoryCheck", "covered_by", "make_checks"]

# Findings of one event are reported in this order, then those of checks that are not named here.
_ORDER: Final = (
    *("slot_out_of_pool", "slot_double_allocated", "free_slot_shared", "slot_freed_twice", "foreign_slot_freed"),
    *("slot_leaked", "read_after_free", "read_of_foreign_slot", "write_to_foreign_slot", "slot_written_twice"),
    *("table_entry_differs", "padded_write", "padding_slot_read", "write_lost", "write_damaged", "wrong_window"),
    *("row_reassigned", "hit_never_written", "hit_differs", "seq_len_backwards", "swa_mapping_stale"),
    *("freed_during_transfer", "transfer_not_held", "input_not_sampled", "input_not_truth", "position_not_place"),
    *(
        "attention_lens",
        "attention_slots",
        "attention_output",
        "identity",
        "computed_otherwise",
        "state_differs",
        "copy_differs",
        "load_landed_late",
    ),
    *("oracle_token", "layer_changed", "bad_values", "failed_load_read"),
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
for _kind in (*_ORDER, *sorted(CHECKS.keys() - set(_ORDER))):
    CHECKS[_kind] = CHECKS.pop(_kind)

CHECK_NAMES: Final = tuple(CHECKS)
FINDING_KINDS: Final = {**{kind: check.finds for kind, check in CHECKS.items()}, **OTHER_KINDS}


def make_checks(
    names: Iterable[str],
    *,
    header: TraceHeader,
    request_table: RequestTable,
    backend: str = "cpu",
    oracle: str = "",
    model: str = "",
    beside: Sequence[type[HistoryCheck]] = (),
) -> CheckSet | None:
    """Return the named checks, and those `beside`, as one that is given every forward and event, in order; None for none."""
    chosen = set(names)
    checks = [check for kind, check in CHECKS.items() if kind in chosen and check.concerns(header)]
    if not chosen and not beside:
        return None
    history = History(header, request_table, backend=backend, oracle=oracle, model=model)
    return CheckSet(history, [*checks, *beside])


def covered_by(names: Iterable[str], header: TraceHeader) -> dict[str, Covered]:
    """Return by which faster ways of replaying each of the named checks finds the same, in the checks' own order; a check
    that does not concern the trace finds nothing in any.
    """
    chosen = {kind: check for kind, check in CHECKS.items() if kind in set(names)}
    return {kind: check.covered if check.concerns(header) else Covered.COMPILED for kind, check in chosen.items()}
