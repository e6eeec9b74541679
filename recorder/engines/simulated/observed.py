"""Where the simulated engine's columns come from: it has no model, and tells the recorder its own arrays; see `observed`."""

from typing import Final

from ..common.observed import (
    ATTENTION,
    COPIES,
    LUT_RUNS,
    SLOTS,
    SUBMITTED,
    SWEEPS,
    TABLE_RUNS,
    TRUTH_RUNS,
    USES,
    How,
    Source,
    Table,
)

_BATCH: Final = "the batch that its model is given"
_BOOKS: Final = "the engine's own books, when it changes them"
SIMULATED: Final[Table] = {
    "forward": {
        ("runner", "mode", "req_pool_indices", "request_ids", "prefix_lens", "extend_lens"): Source(
            How.OBSERVED, _BATCH
        ),
        ("input_ids", "positions", "out_cache_loc"): Source(How.OBSERVED, _BATCH),
        ("sampled_lens", "sampled_tokens"): Source(How.OBSERVED, "what its sampler returns"),
        TABLE_RUNS: Source(How.OBSERVED, "its req_to_token"),
        LUT_RUNS: Source(How.OBSERVED, "its full-to-SWA table"),
        TRUTH_RUNS: Source(How.TOLD, "its scheduler's tokens"),
        ATTENTION: Source(How.ABSENT, "it has no attention: its model reads the slots of its req_to_token"),
        SUBMITTED: Source(How.OBSERVED, "what its model hands to the pools, where it is configured to tell it"),
    },
    "sample": {
        ("forward",): Source(How.NUMBERED, "the forward whose result it is"),
        ("sampled_lens", "sampled_tokens"): Source(How.OBSERVED, "what its sampler returned, a step later"),
    },
    "request": {USES["request"]: Source(How.TOLD, _BOOKS)},
    "status": {USES["status"]: Source(How.TOLD, _BOOKS)},
    "alloc": {USES["alloc"]: Source(How.TOLD, _BOOKS)},
    "free": {USES["free"]: Source(How.TOLD, _BOOKS)},
    "evict": {USES["evict"]: Source(How.TOLD, _BOOKS)},
    "sweep": {
        ("forward", "runner"): Source(How.NUMBERED, "the last forward begun before it"),
        SWEEPS: Source(How.TOLD, "its radix tree"),
    },
    "transfer": {
        ("runner",): Source(How.NUMBERED, "the group's"),
        (
            "request_id",
            "req_pool_indices",
            "room",
            "peer",
            "mode",
            "status",
            "num_bytes",
            "note",
            "prefix_lens",
        ): Source(How.TOLD, _BOOKS),
        SLOTS: Source(How.OBSERVED, "its req_to_token"),
    },
    "kv_copy": {
        ("request_id", "note"): Source(How.TOLD, _BOOKS),
        COPIES: Source(How.TOLD, _BOOKS),
    },
}
