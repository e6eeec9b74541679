"""The trace's Arrow schema: one row per event, fixed columns, no nulls.

Every list column holds plain int64 values (bytes are uint8), so the child array of a list column is the flat tensor
that a kernel takes and its offsets are the prefix sums. Columns that an event kind does not use are empty lists or
the defaults below. `docs/reference/trace-format.md` describes each column for readers outside this project.
"""

from typing import Final, Literal, get_args

import pyarrow as pa

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 15

HEADER_KEY: Final = b"kvcanary.header"
HEADER_CRC_KEY: Final = b"kvcanary.header_crc32c"
FIRST_EVENT_KEY: Final = b"kvcanary.first_event"
NUM_EVENTS_KEY: Final = b"kvcanary.num_events"
CRC_KEY: Final = b"kvcanary.crc32c"
ENGINE_EVENTS_KEY: Final = b"kvcanary.engine_events"

EVENT_KINDS: Final = (
    "forward",  # one forward pass: batch, table changes before it, tokens, slots written, bytes, sampled tokens
    "sample",  # sampled tokens of an earlier forward that arrived after its event was closed (overlap scheduling)
    "request",  # a request became known: its names, prompt length, room, labels
    "status",  # a request got its row, or gave it back: admitted, retracted, finished, aborted
    "alloc",  # slots given to a request
    "free",  # slots given back by a request, with the reason in `note`
    "evict",  # slots dropped by the prefix cache
    "sweep",  # what the prefix cache holds: slot, position, previous slot, locked
    "transfer",  # prefill/decode transfer: peer, room, slots, bytes, start / end / failed
    "kv_copy",  # whole slots copied by the engine outside a forward: fork, offload, load-back, compaction
    "keyframe",  # what a replay would hold at the start of a segment, in parts
    "segment",  # the end of a segment that others follow
    "mark",  # a note; an injected fault's ground truth
    "loss",  # events that were dropped, and why
)

# Scalar columns and what an event that does not use them holds.
SCALARS: Final[dict[str, tuple[pa.DataType, int | str]]] = {
    "event": (pa.int64(), -1),
    "kind": (pa.utf8(), ""),
    "time_ns": (pa.int64(), 0),
    "forward": (pa.int64(), -1),
    "runner": (pa.int64(), 0),
    "mode": (pa.utf8(), ""),
    "kv_watched": (pa.int64(), 0),
    "request_id": (pa.int64(), -1),
    "name": (pa.utf8(), ""),
    "prompt_len": (pa.int64(), -1),
    "room": (pa.int64(), -1),
    "peer": (pa.utf8(), ""),
    "status": (pa.utf8(), ""),
    "num_bytes": (pa.int64(), 0),
    "lost_events": (pa.int64(), 0),
    "note": (pa.utf8(), ""),
    "labels": (pa.utf8(), ""),
    "attention_watched": (pa.int64(), 0),
    "submitted_watched": (pa.int64(), 0),
    "window_watched": (pa.int64(), 0),
    "outputs_watched": (pa.int64(), 0),
}

# int64 list columns, in groups that share their lengths.
_INT_LIST_GROUPS: Final = {
    "a forward's requests, [bs] each": "req_pool_indices request_ids prefix_lens extend_lens truth_lens sampled_lens",
    "a forward's tokens, [tokens] each; out_cache_loc is [tables * tokens], table by table": "input_ids positions out_cache_loc",
    "[sum(sampled_lens)]; sampled_logprobs may hold nothing instead": "sampled_tokens sampled_logprobs",
    "req_to_token changes as runs: table_slots holds table_count[i] values for each run i, one after another": (
        "table_index table_row table_start table_count table_slots"
    ),
    "full -> swa table changes as runs": "lut_index lut_start lut_count lut_slots",
    "truth token changes as runs": "truth_row truth_start truth_count truth_tokens",
    "observed KV changes; bytes are in kv_change_bytes, capture_bytes of the stream for each": (
        "kv_change_stream kv_change_slot kv_change_phase"
    ),
    "runs of slots: what alloc, free, evict and transfer act on, and what a loss may have written": (
        "slot_group slot_start slot_count"
    ),
    "sweep entries": "sweep_group sweep_slot sweep_position sweep_prev sweep_locked",
    "runs of copied slots; tier 0 is the pool, tier 1 the host": (
        "copy_group copy_src_tier copy_src copy_dst_tier copy_dst copy_count"
    ),
    "hashes of the bytes at both ends of each run of copied slots, all layers, 0 if they were not read; or nothing": (
        "copy_src_hash copy_dst_hash copy_before_hash copy_landed"
    ),
    "rows of the array that a part of a keyframe holds, as runs; their bytes are in state_bytes": "state_start state_count",
    "what the attention kernels of a forward got, [bs] each, or nothing if they were not observed": (
        "attention_seq_lens attention_query_lens"
    ),
    "where the slots that attention got differ from what the forward was to read and write, as runs over a request's "
    "positions, in a group's own slots": "attention_group attention_request attention_start attention_count attention_slots",
    "the positions that a forward reads of a request's prefix, if they are not those of the group's window": (
        "window_group window_request window_start window_count"
    ),
    "tokens whose attention gave what is the mean of no run of positions' values": (
        "output_group output_request output_position output_layer"
    ),
    "what a request's KV depends on beside its tokens, see IDENTITY_KINDS": (
        "identity_kind identity_start identity_count identity_hash"
    ),
    "what happened to slots of recurrent state since the forward before and in this one, in order, see RECURRENT_OPS": (
        "recurrent_pool recurrent_op recurrent_request recurrent_source recurrent_slot recurrent_before recurrent_after"
    ),
    "values that a forward wrote and that no model writes, by request, stream and kind, see WRITTEN_VALUES": (
        "value_request value_stream value_kind value_layer value_token value_rows"
    ),
}
INT_LISTS: Final = tuple(name for names in _INT_LIST_GROUPS.values() for name in names.split())

OUTPUT_COLUMNS: Final = tuple(name for name in INT_LISTS if name.startswith("output_"))

# Those by which any event may change a table.
TABLE_CHANGES: Final = tuple(
    name for name in INT_LISTS if name.startswith(("table_", "lut_", "truth_")) and name != "truth_lens"
)

# uint8 list columns; 64-bit offsets, since whole-row capture of a large prefill can pass 2 GiB in a batch.
BYTE_LISTS: Final = (
    "kv_bytes",  # written slots: [stream][token][capture_bytes], streams in header order, the runner's own only
    "kv_change_bytes",
    "state_bytes",  # a part of a keyframe: rows of the array named by `note`, one after another
    "kv_submitted_bytes",  # what the model handed to the cache, laid out as kv_bytes, if that differs
)

# Columns that came after 1.0, with the minor version: an older trace does not have them, and no event of it uses them.
ADDED: Final[dict[str, int]] = {
    **dict.fromkeys(("state_start", "state_count", "state_bytes"), 2),
    **dict.fromkeys(("attention_watched", "kv_submitted_bytes", "submitted_watched", "window_watched"), 3),
    **dict.fromkeys((name for name in INT_LISTS if name.startswith(("attention_", "window_"))), 3),
    **dict.fromkeys((name for name in INT_LISTS if name.startswith("identity_")), 4),
    **dict.fromkeys((name for name in INT_LISTS if name.startswith("recurrent_")), 5),
    **dict.fromkeys(("copy_src_hash", "copy_dst_hash", "copy_before_hash", "copy_landed"), 6),
    **dict.fromkeys((name for name in INT_LISTS if name.startswith("value_")), 6),
    "sampled_logprobs": 7,
    **dict.fromkeys(("outputs_watched", *OUTPUT_COLUMNS), 15),
}

# `attention_watched` of a forward, or-ed: what was read where the attention kernels take it.
ATTENTION_LENS: Final = 1  # attention_seq_lens and attention_query_lens
ATTENTION_SLOTS: Final = 2  # the slots, of all groups of the runner; attention_slots holds all that differ

# `identity_kind`: what a value of a request's identity is. Of `media` the positions that it fills, of others none; hash 0 is
# "none". A kind without a value is not declared, and nothing is judged by it.
IDENTITY_KINDS: Final = ("adapter", "salt", "weights", "media")

# `recurrent_op`: the slot was zeroed; it became a copy of the source; a request of the forward read its state from the source
# (-1: it began with none) and wrote it to the slot; the forward left in the slot, too, a request's state behind its first tokens,
# as many as `recurrent_source` says. The hashes are of bytes: the source's before, the slot's after; 0 for none.
RECURRENT_OPS: Final = ("clear", "copy", "step", "save")

# `sampled_logprobs`: the bits of a float32, NaN for none, and in the bits from 32 on of what the engine computed it: it does not
# say; the model's logits as they are; what it sampled from, behind temperature, penalties and the like.
LOGPROB_BITS: Final = 32
LOGPROB_KINDS: Final = ("", "raw", "processed")

# `value_kind`: a row of K or V, which is what a token has in a layer, with a NaN in it, with an infinity, or all of zeros; or, of a type
# of 8 bits, all of zeros and the largest finite value.
WRITTEN_VALUES: Final = ("nan", "infinite", "zeros", "saturated")
SATURATED_SINCE: Final = 12  # the minor version

PHASE_BEFORE: Final = 0  # an observed KV change seen before the forward ran
PHASE_AFTER: Final = 1  # ... seen after it

# `status` of a forward event: the model raised, or nobody saw it end, so that what it wrote is unknown. Since minor version 7.
FAILED: Final = "failed"
# ... and a number: of a step that was recorded as several forwards, this many came before it. Since minor version 11.
PART: Final = "part "

# `status` of a loss event that lists every slot which the lost events may have written. Without it, all state is
# unknown after the loss.
SLOTS_LISTED: Final = "slots_listed"

# `status` of a loss event with which a recording begins in an engine that had run before: nothing of the recording is lost, and
# all state is unknown. Since minor version 7.
LATE: Final = "late"
RAN_BEFORE: Final = "the engine had run before the recording began"

# `mode` of a forward event.
Mode = Literal["extend", "decode", "mixed", "target_verify", "draft_extend", "idle"]

# `status` of an alloc event: fresh from the pool; the request joined slots that somebody holds; the request handed
# its slots to the prefix cache.
ALLOC_FRESH: Final = ""
ALLOC_SHARED: Final = "shared"
ALLOC_CACHED: Final = "cached"
AllocStatus = Literal["", "shared", "cached"]
ALLOC_STATUSES: Final = get_args(AllocStatus)
SlotChange = Literal["alloc", "free", "evict"]

# `status` of a status event. The last three give the row back.
RequestStatus = Literal["admitted", "retracted", "finished", "aborted"]
REQUEST_STATUSES: Final = get_args(RequestStatus)

# `status` and `mode` of a transfer event.
TransferStatus = Literal["start", "end", "failed"]
TRANSFER_STATUSES: Final = get_args(TransferStatus)
SEND: Final = "send"
RECEIVE: Final = "receive"
TransferDirection = Literal["send", "receive"]
TRANSFER_DIRECTIONS: Final = get_args(TransferDirection)
SEEN: Final = "seen"  # the note of a copy that nobody made: what lies in the pool stands for what a storage may have
# ... of one that moves what is in slots to others, with whoever has them: the slots that it leaves are what these were. Since
# minor version 13.
MOVED: Final = "moved"
# The note of "admitted": the request has it already, and goes on from fewer tokens than it had, as the engine means it to.
REWOUND: Final = "rewound"
PULLED: Final = "held ready"  # the note of a send of which the other side takes what it lacks

SUBMITTED: Final = "submitted"  # the origin of a stream's bytes: what the model hands to the cache

# The note of slots that the prefix cache has had already, and has alone now: nobody uses them any more.
LET_GO: Final = "let go"
# The note of slots of the prefix cache that a request has let go of, and of which the engine counts a user whom nobody knows.
STILL_USED: Final = "still used"
# The note of slots that somebody was given, nobody knows who: no request is left and no cache has them, and they are not free.
NOBODYS: Final = "nobody's"

# What a header may promise of the history of slots: nothing; that everything is recorded which an allocator gives out and
# takes back, but not who shares it and what the prefix cache holds; or that every alloc, free, evict, hand-over to the prefix
# cache and request status is.
SlotHistoryTold = Literal["", "allocator", "complete"]
SLOT_HISTORIES: Final = get_args(SlotHistoryTold)
ROLES: Final = ("", "prefill", "decode")
# What a recording may leave unwatched: layers of a group, bytes of a slot, a whole pool, a runner's forwards (drafts),
# steps inside a CUDA graph, slots filled from outside, requests, what a runner's model hands to the cache, or anything else.
NOT_WATCHED: Final = ("layers", "bytes", "pool", "runner", "graph", "slots", "requests", "submitted", "other")
TOKENS: Final = ("plain", "hashed")  # token ids, or salted hashes in their place

# `status` of a keyframe event: it begins; a part of it: an array, a request that the arrays name, a forward whose
# samples are still to come; it is whole.
KEYFRAME_BEGIN: Final = "begin"
KEYFRAME_PART: Final = "part"
KEYFRAME_REQUEST: Final = "request"
KEYFRAME_FORWARD: Final = "forward"
KEYFRAME_END: Final = "end"

COST: Final = "cost"  # the note of the mark in which a recording says what its hooks took of the engine's time

# `status` of a segment event: the recording goes on in the next file; its `note` is FROZEN if a freeze cut it.
SEGMENT_CONTINUES: Final = "goes_on"
FROZEN: Final = "frozen"

# What a trace may ask of whoever reads it; each limit holds before memory is taken. docs/reference/limits.md says why.
MAX_HEADER_BYTES: Final = 8 << 20
MAX_TEXT_CHARS: Final = 1 << 16  # of one text in the header
MAX_MISSING_SEGMENTS: Final = 1_000  # listed of those that lack between two others
MAX_METADATA_BYTES: Final = 2 * MAX_HEADER_BYTES  # of any message: the schema's has the header in it
MAX_BATCH_METADATA_BYTES: Final = 1 << 18  # of one batch: its columns, their buffers and its numbers
MAX_FREE_BATCH_BYTES: Final = 256 << 20  # of one batch, decompressed and without holes, whatever it takes on the disk
MAX_BATCH_RATIO: Final = 300  # of a larger one, times the bytes that it takes on the disk
MAX_SEARCHED: Final = 16  # times a damaged file's size that may be tried in search of its next whole batch
MAX_SLOTS: Final = 1 << 31  # of a pool, or entries of a full-to-SWA table
MAX_TABLE_CELLS: Final = 1 << 36
MAX_TOKEN_BYTES: Final = 1 << 24  # of a token in one layer's half
MAX_PARTS: Final = 64  # groups, tables, runners
MAX_KV_SOURCES: Final = 4  # streams of a half
MAX_NOT_WATCHED: Final = 1024
MAX_PADDING_SLOTS: Final = 1024  # of a group

TIER_POOL: Final = 0
TIER_HOST: Final = 1


def trace_schema() -> pa.Schema:
    """Return the columns of this build's format, without metadata."""
    ints = pa.list_(pa.field("item", pa.int64(), nullable=False))
    data = pa.large_list(pa.field("item", pa.uint8(), nullable=False))
    kinds = {name: kind for name, (kind, _) in SCALARS.items()}
    kinds |= {**dict.fromkeys(INT_LISTS, ints), **dict.fromkeys(BYTE_LISTS, data)}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])
