"""History checks: faults that no canary record shows, found in the order of events. One check a module."""

from collections.abc import Iterable
from typing import Final

from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from .attention_lens import AttentionLens
from .attention_slots import AttentionSlots
from .check import Covered, HistoryCheck
from .foreign_slot_freed import ForeignSlotFreed
from .free_slot_shared import FreeSlotShared
from .freed_during_transfer import FreedDuringTransfer
from .history import History
from .hit_differs import HitDiffers
from .hit_never_written import HitNeverWritten
from .input_not_sampled import InputNotSampled
from .input_not_truth import InputNotTruth
from .padded_write import PaddedWrite
from .padding_slot_read import PaddingSlotRead
from .panel import Panel
from .read_after_free import ReadAfterFree
from .read_of_foreign_slot import ReadOfForeignSlot
from .row_reassigned import RowReassigned
from .seq_len_backwards import SeqLenBackwards
from .slot_double_allocated import SlotDoubleAllocated
from .slot_freed_twice import SlotFreedTwice
from .slot_leaked import SlotLeaked
from .slot_out_of_pool import SlotOutOfPool
from .slot_written_twice import SlotWrittenTwice
from .swa_mapping_stale import SwaMappingStale
from .table_entry_differs import TableEntryDiffers
from .transfer_not_held import TransferNotHeld
from .write_damaged import WriteDamaged
from .write_lost import WriteLost
from .write_to_foreign_slot import WriteToForeignSlot
from .wrong_window import WrongWindow

__all__ = ["CHECK_NAMES", "Covered", "HistoryCheck", "covered_by", "make_checks"]

# Each check is named after the one kind of finding that it makes.
_CHECKS: Final[dict[str, type[HistoryCheck]]] = {
    "slot_out_of_pool": SlotOutOfPool,
    "slot_double_allocated": SlotDoubleAllocated,
    "free_slot_shared": FreeSlotShared,
    "slot_freed_twice": SlotFreedTwice,
    "foreign_slot_freed": ForeignSlotFreed,
    "slot_leaked": SlotLeaked,
    "read_after_free": ReadAfterFree,
    "read_of_foreign_slot": ReadOfForeignSlot,
    "write_to_foreign_slot": WriteToForeignSlot,
    "slot_written_twice": SlotWrittenTwice,
    "table_entry_differs": TableEntryDiffers,
    "padded_write": PaddedWrite,
    "padding_slot_read": PaddingSlotRead,
    "write_lost": WriteLost,
    "write_damaged": WriteDamaged,
    "wrong_window": WrongWindow,
    "row_reassigned": RowReassigned,
    "hit_never_written": HitNeverWritten,
    "hit_differs": HitDiffers,
    "seq_len_backwards": SeqLenBackwards,
    "swa_mapping_stale": SwaMappingStale,
    "freed_during_transfer": FreedDuringTransfer,
    "transfer_not_held": TransferNotHeld,
    "input_not_sampled": InputNotSampled,
    "input_not_truth": InputNotTruth,
    "attention_lens": AttentionLens,
    "attention_slots": AttentionSlots,
}

CHECK_NAMES: Final = tuple(_CHECKS)


def make_checks(
    names: Iterable[str], *, header: TraceHeader, request_table: RequestTable, backend: str = "cpu"
) -> list[HistoryCheck]:
    """Return the named checks as one that must be given every forward and every other event, in order; none for none.

    Args:
        names: out of `CHECK_NAMES`; the checks keep their own order.
        header: the trace's.
        request_table: what is known of the requests.
        backend: what the ledger's loops run on, see `kernels.dispatch.select`.
    """
    chosen = set(names)
    if not chosen:
        return []
    history = History(header, request_table, backend=backend)
    return [Panel(history, [make(history) for name, make in _CHECKS.items() if name in chosen])]


def covered_by(names: Iterable[str]) -> dict[str, Covered]:
    """Return by which faster ways of replaying each of the named checks finds the same, in the checks' own order."""
    chosen = set(names)
    return {name: check.covered for name, check in _CHECKS.items() if name in chosen}
