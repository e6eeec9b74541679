"""Where each column of each event comes from: what an adapter observes, what it is told, and what it works out.

Each adapter has its own table beside it; `RECORDER` is what the recorder itself does for all of them. `docs/internals/observed.md`
is made of them, and a test holds that no column is left out. An entry is for a human who asks what a verdict rests on:
change it together with the code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class How(Enum):
    """How a value comes into the trace."""

    OBSERVED = "observed"  # read from the tensors or lists that the engine works with
    TOLD = "told"  # an argument or a field of the engine's host code, which may differ from what its kernels got
    NUMBERED = "numbered"  # the recorder's own numbering, time or framing: nothing of the engine's is in it
    DERIVED = "derived"  # worked out: the header names such columns of a forward, and nothing is judged from them
    ABSENT = "not recorded"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a column comes from, in a sentence's words without its full stop."""

    how: How
    where: str


Columns = tuple[str, ...]
Table = Mapping[str, Mapping[Columns, Source]]

BATCH: Final = ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens")
TABLE_RUNS: Final = ("table_index", "table_row", "table_start", "table_count", "table_slots")
LUT_RUNS: Final = ("lut_index", "lut_start", "lut_count", "lut_slots")
TRUTH_RUNS: Final = ("truth_row", "truth_start", "truth_count", "truth_tokens")
KV_CHANGES: Final = ("kv_change_stream", "kv_change_slot", "kv_change_phase", "kv_change_bytes")
SLOTS: Final = ("slot_group", "slot_start", "slot_count")
COPIES: Final = ("copy_group", "copy_src_tier", "copy_src", "copy_dst_tier", "copy_dst", "copy_count")
SWEEPS: Final = ("sweep_group", "sweep_slot", "sweep_position", "sweep_prev", "sweep_locked")
STATE: Final = ("state_start", "state_count", "state_bytes")
ATTENTION_LENS: Final = ("attention_seq_lens", "attention_query_lens")
ATTENTION_SLOTS: Final = (
    "attention_group",
    "attention_request",
    "attention_start",
    "attention_count",
    "attention_slots",
)
ATTENTION: Final = ("attention_watched", *ATTENTION_LENS, *ATTENTION_SLOTS)
SUBMITTED: Final = ("submitted_watched", "kv_submitted_bytes")
WINDOW: Final = ("window_watched", "window_group", "window_request", "window_start", "window_count")
EVERY: Final = ("event", "kind", "time_ns")

# The columns that each kind of event uses; a test holds the traces in data/ and the schema against it.
USES: Final[dict[str, Columns]] = {
    "forward": (
        *("forward", "runner", "mode", "kv_watched", "note"),
        *BATCH,
        *("truth_lens", "sampled_lens", "input_ids", "positions", "out_cache_loc", "sampled_tokens"),
        *TABLE_RUNS,
        *LUT_RUNS,
        *TRUTH_RUNS,
        *KV_CHANGES,
        *ATTENTION,
        *("kv_bytes", *SUBMITTED),
        *WINDOW,
    ),
    "sample": ("forward", "sampled_lens", "sampled_tokens"),
    "request": ("request_id", "name", "prompt_len", "room", "labels"),
    "status": ("request_id", "status", "req_pool_indices", "note"),
    "alloc": ("request_id", "status", "req_pool_indices", "note", *SLOTS),
    "free": ("request_id", "req_pool_indices", "note", *SLOTS),
    "evict": ("request_id", "req_pool_indices", "note", *SLOTS),
    "sweep": ("forward", "runner", *SWEEPS, *KV_CHANGES),
    "transfer": (
        *("forward", "runner", "request_id", "req_pool_indices", "room", "peer", "mode", "status", "num_bytes"),
        *("note", "prefix_lens", "kv_bytes"),
        *SLOTS,
        *KV_CHANGES,
    ),
    "kv_copy": ("request_id", "note", *COPIES),
    "keyframe": (
        *("status", "note", "labels", "request_id", "name", "prompt_len", "room", "forward", "mode"),
        *BATCH,
        *("input_ids", "positions", "out_cache_loc", "sampled_lens", "sampled_tokens"),
        *STATE,
    ),
    "segment": ("status", "note"),
    "mark": ("forward", "note", "labels"),
    "loss": ("lost_events", "note", "status", *SLOTS),
}

_OWN: Final = "the recorder's own"
RECORDER: Final[Table] = {
    "forward": {
        ("forward", "kv_watched"): Source(How.NUMBERED, f"{_OWN} count, and whether it read the prefix bytes again"),
        ("note",): Source(How.NUMBERED, "what a hook or the model raised"),
        TABLE_RUNS: Source(
            How.OBSERVED, "the cells of the table that the forward reads, where they differ from those before"
        ),
        TRUTH_RUNS: Source(How.TOLD, "the scheduler's tokens, where they differ from those before"),
        ("truth_lens",): Source(How.TOLD, "how many tokens the scheduler has"),
        KV_CHANGES: Source(
            How.OBSERVED, "the pool, every `kv_watch_every` forwards: bytes of prefix slots that nobody wrote"
        ),
        ("kv_bytes",): Source(How.OBSERVED, "the pool, of the slots of out_cache_loc, after the forward"),
        WINDOW: Source(
            How.OBSERVED,
            "the positions of a sliding group that the adapter says the forward reads (a `TableRead`), where they are not "
            "the window's; nothing where the engine has a req_to_token",
        ),
    },
    "sweep": {KV_CHANGES: Source(How.OBSERVED, "the pool, of the slots that the prefix cache holds")},
    "transfer": {
        KV_CHANGES: Source(How.OBSERVED, "the pool, of the slots sent"),
        ("kv_bytes",): Source(How.OBSERVED, "the pool, of the slots received, once they have landed"),
        ("forward",): Source(How.NUMBERED, "the last forward begun before it"),
    },
    "keyframe": {
        USES["keyframe"]: Source(How.NUMBERED, "what a replay of all before it would hold: the recorder's own state")
    },
    "segment": {USES["segment"]: Source(How.NUMBERED, _OWN)},
    "mark": {USES["mark"]: Source(How.TOLD, "whoever calls `mark`; the forward begun last")},
    "loss": {
        USES["loss"]: Source(
            How.NUMBERED, "what the recorder dropped, and the slots that it may have written; or `lost`"
        )
    },
}


def with_recorder(own: Table) -> dict[str, dict[Columns, Source]]:
    """Return an adapter's whole table: its own entries, and the recorder's for what it says nothing of."""
    whole: dict[str, dict[Columns, Source]] = {}
    for kind in USES:
        mine = dict(own.get(kind, {}))
        said = {column for columns in mine for column in columns}
        for columns, source in RECORDER.get(kind, {}).items():
            left = tuple(column for column in columns if column not in said)
            if left:
                mine[left] = source
        whole[kind] = mine
    return whole


def missing(table: Table) -> list[str]:
    """Return what a whole table says nothing of, or says twice, or what no such event uses, as `kind.column`."""
    wrong = []
    for kind, columns in USES.items():
        said = [column for named in table.get(kind, {}) for column in named]
        wrong += [f"{kind}.{column}" for column in {*columns, *said} if said.count(column) != columns.count(column)]
    return sorted(wrong)
