"""A sign of damage: a violation or a finding, with its place, its reasons and what it says in words."""

from dataclasses import dataclass
from typing import Final

from ...kernels.constants import FailReason
from ...replayer.report.findings import NO_ADAPTER

CHAIN: Final = int(FailReason.VERIFY_CHAIN_HASH)
POSITION: Final = int(FailReason.VERIFY_POSITION)
KV_HASH: Final = int(FailReason.VERIFY_KV_HASH)
TOKEN: Final = int(FailReason.VERIFY_TOKEN)
WRITE_TOKEN: Final = int(FailReason.WRITE_TOKEN)
WRITE_POSITION: Final = int(FailReason.WRITE_POSITION)
CONTENT: Final = CHAIN | POSITION | TOKEN
# What went wrong where: the branches of the tree whose leaves are the kinds.
BRANCHES: Final = ("table", "allocation", "write", "read", "transfer", "content", "identity", "input")
# The branch of a finding that no rule explains; of a violation, by its reasons, in `Sign.branch`.
_BRANCH_OF_FINDING: Final = {
    **dict.fromkeys(("row_reassigned", "table_entry_differs", "padding_slot_read", "swa_mapping_stale"), "table"),
    **dict.fromkeys(
        ("slot_out_of_pool", "slot_double_allocated", "free_slot_shared", "slot_freed_twice"), "allocation"
    ),
    **dict.fromkeys(("foreign_slot_freed", "slot_leaked", "read_after_free", "read_of_foreign_slot"), "allocation"),
    **dict.fromkeys(("write_to_foreign_slot", "slot_written_twice", "padded_write"), "write"),
    **dict.fromkeys(("write_lost", "write_damaged", "layer_changed"), "write"),
    **dict.fromkeys(("wrong_window", "attention_lens", "attention_slots", "attention_output"), "read"),
    **dict.fromkeys(("freed_during_transfer", "transfer_not_held", "transfer_differs"), "transfer"),
    **dict.fromkeys(("transfer_source_damaged", "transfer_source_changed"), "transfer"),
    **dict.fromkeys(("copy_differs", "load_landed_late", "failed_load_read"), "transfer"),
    **dict.fromkeys(("hit_never_written", "hit_differs"), "content"),
    **dict.fromkeys(("identity", "token_bytes", "computed_otherwise"), "identity"),
    **dict.fromkeys(("state_differs", "bad_values", "model_bytes"), "content"),
    **dict.fromkeys(
        ("seq_len_backwards", "input_not_sampled", "input_not_truth", "oracle_token", "position_not_place"), "input"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A violation (`bits` are its reasons, `kind` is empty) or a finding (`kind`), as in the report's row.

    `position` is where the request expects the slot, `stored_position` what the slot's record says. -1 if a field does
    not apply. A finding's `stored_token` is what was fed or stands in the slot; `cause` divides findings of one kind;
    `detail` is for sentences alone.
    """

    kind: str
    bits: int
    event: int
    forward: int
    mode: str
    runner: int
    group: int
    request_id: int
    request: str
    row: int
    position: int
    slot: int
    count: int = 1
    stored_token: int = -1
    expected_token: int = -1
    stored_position: int = -1
    writer_event: int = -1
    writer_forward: int = -1
    writer_request_id: int = -1
    writer_request: str = ""
    last_forward: int = -1  # of a violation
    detail: str = ""
    cause: str = ""
    evidence: tuple[int, ...] = ()

    @property
    def branch(self) -> str:
        """What went wrong where, as far as this sign alone says it, "" if it says nothing."""
        if self.kind:
            return "content" if self.cause in ("rotated", *NO_ADAPTER) else _BRANCH_OF_FINDING.get(self.kind, "")
        if self.bits & (WRITE_TOKEN | WRITE_POSITION):
            return "input"
        return "content" if self.bits & CONTENT else "write" if self.bits & KV_HASH else ""

    @property
    def differs(self) -> str:
        """What differs, in plain words."""
        if self.kind:
            where = f"{self.reader}, {self.place}" if self.slot >= 0 else self.reader
            return f"{self.kind.replace('_', ' ')} in {self.when}, {where}" + (
                f": {self.detail}" if self.detail else ""
            )
        if self.bits & (WRITE_TOKEN | WRITE_POSITION):
            fed = f"token {self.stored_token}" if self.bits & WRITE_TOKEN else f"position {self.stored_position}"
            own = f"token {self.expected_token}" if self.bits & WRITE_TOKEN else f"position {self.position}"
            return f"{self.reader} was fed {fed} in {self.when}, expected {own}, for {self.place}"
        held = f"token {self.stored_token}, position {self.stored_position}, written by {self.writer}"
        what = "other K and V than were written there" if self.bits == KV_HASH else held
        if not self.bits & (TOKEN | POSITION | KV_HASH):
            what = f"what goes on from another beginning than the request's ({held})"
        return f"{self.reader} read {self.place} in {self.when}, and found {what}"

    @property
    def reader(self) -> str:
        """The request, with its row, in words."""
        if self.request_id < 0:
            return "the prefix cache" if self.mode == "sweep" else "nobody"
        return _request(self.request, self.request_id) + (f" (row {self.row})" if self.row > 0 else "")

    @property
    def place(self) -> str:
        """The slot, with its group and the position that it stands for, in words."""
        words = f"slot {self.slot}" if self.count == 1 else f"slot {self.slot} and {self.count - 1} more"
        if self.group >= 0:
            words += f" of group {self.group}"
        return words + (f", position {self.position}" if self.position >= 0 else "")

    @property
    def when(self) -> str:
        """The forward, in words."""
        if self.forward < 0:
            return f"event {self.event}"
        return f"forward {self.forward}" + (f" ({self.mode})" if self.mode else "")

    @property
    def writer_name(self) -> str:
        """The request that wrote a violation's slot last."""
        return _request(self.writer_request, self.writer_request_id)

    @property
    def writer(self) -> str:
        """Who wrote a violation's slot last, in words."""
        if self.writer_event < 0:
            return "nobody in this trace"
        return f"{self.writer_name} in forward {self.writer_forward}"


def _request(name: str, request_id: int) -> str:
    if name:
        return f"request {name}"
    return f"request {request_id}" if request_id >= 0 else "nobody"
