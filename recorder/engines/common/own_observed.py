"""Where the columns of an engine come from that its integrator attaches himself; see `observed`."""

from typing import Final

from .observed import (
    ATTENTION,
    BATCH,
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

_INPUT: Final = "`ForwardInput`, copied when `before_forward` is called: pass the tensors that the model gets"
OWN: Final[Table] = {
    "forward": {
        ("runner", "mode", *BATCH): Source(How.TOLD, "`ForwardInput`, copied when `before_forward` is called"),
        ("input_ids", "positions", "out_cache_loc"): Source(How.OBSERVED, _INPUT),
        ("sampled_lens", "sampled_tokens"): Source(How.TOLD, "the arguments of `after_forward`"),
        TABLE_RUNS: Source(
            How.OBSERVED, "`ForwardInput.reads`: the table itself, or the slots that attention is given"
        ),
        LUT_RUNS: Source(How.OBSERVED, "`ForwardInput.luts`: the table itself"),
        TRUTH_RUNS: Source(How.TOLD, "`ForwardInput.truth`"),
        ATTENTION: Source(
            How.OBSERVED, "`ForwardInput.attention` or `Recorder.attention`, where the integrator gives it"
        ),
        SUBMITTED: Source(How.OBSERVED, "what the model hands to the cache, where the integrator gives it"),
    },
    "sample": {USES["sample"]: Source(How.TOLD, "the arguments of `sampled`")},
    "request": {USES["request"]: Source(How.TOLD, "the arguments of `request`")},
    "status": {USES["status"]: Source(How.TOLD, "the arguments of `request_status`")},
    "alloc": {USES["alloc"]: Source(How.TOLD, "the arguments of `slots`")},
    "free": {USES["free"]: Source(How.TOLD, "the arguments of `slots`")},
    "evict": {USES["evict"]: Source(How.TOLD, "the arguments of `slots`")},
    "sweep": {
        ("forward",): Source(How.NUMBERED, "the last forward begun before it"),
        ("runner", *SWEEPS): Source(How.TOLD, "the arguments of `sweep`"),
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
        ): Source(How.TOLD, "the arguments of `transfer`"),
        SLOTS: Source(How.TOLD, "the arguments of `transfer`"),
    },
    "kv_copy": {USES["kv_copy"]: Source(How.TOLD, "the arguments of `kv_copy`")},
}
