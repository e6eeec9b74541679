"""Where vLLM's columns come from; see `observed`."""

from typing import Final

from ..common.observed import (
    ATTENTION,
    COPIES,
    LUT_RUNS,
    SUBMITTED,
    SWEEPS,
    TABLE_RUNS,
    TRUTH_RUNS,
    USES,
    How,
    Source,
    Table,
)

_BLOCKS: Final = "the blocks that the group's manager and the block pool are called with, as slots"
VLLM: Final[Table] = {
    "forward": {
        ("runner",): Source(How.NUMBERED, "0 the target, 1 a draft model's layers"),
        ("mode",): Source(
            How.DERIVED, "from lengths and what the scheduler has drafted; a label, by which nothing is judged"
        ),
        ("req_pool_indices", "request_ids"): Source(
            How.NUMBERED, "in the order seen: vLLM's rows change between steps"
        ),
        ("prefix_lens",): Source(
            How.TOLD,
            "the runner's num_computed_tokens (on the device where drafts are verified asynchronously); of a draft's "
            "forward derived: 0",
        ),
        ("extend_lens",): Source(
            How.TOLD, "`SchedulerOutput.num_scheduled_tokens`; of a draft's forward observed: query_start_loc"
        ),
        ("input_ids",): Source(
            How.OBSERVED, "the tensor that the model is called with; -1 for embeddings, and in a draft's forward"
        ),
        ("positions",): Source(
            How.OBSERVED,
            "the tensor that the model is called with; of a model that is fed several dimensions (M-RoPE) "
            "derived: the place in the sequence; of a draft's forward derived: from 0 on",
        ),
        ("out_cache_loc",): Source(
            How.OBSERVED,
            "the slot mapping where the layers take it, else the block table's on the device; of a draft's forward the one that its "
            "first layer takes",
        ),
        ("sampled_lens", "sampled_tokens"): Source(How.OBSERVED, "`ModelRunnerOutput.sampled_token_ids`"),
        TABLE_RUNS: Source(How.OBSERVED, "the runner's block table on the device, when the model is called, as slots"),
        LUT_RUNS: Source(How.ABSENT, "vLLM has no such table: each group has its own block table"),
        TRUTH_RUNS: Source(How.TOLD, "the request's prompt_token_ids, and what was sampled for it"),
        ATTENTION: Source(
            How.OBSERVED,
            "the metadata that each layer's attention is given, before the model and after it, for backends whose "
            "fields are known; of others and of drafts nothing",
        ),
        ("kv_bytes",): Source(
            How.OBSERVED, "the pool, after the forward; where the CPU's attention packs it, what the model hands to it"
        ),
        SUBMITTED: Source(How.ABSENT, "only one of the two is recorded"),
    },
    "sample": {
        ("forward",): Source(How.NUMBERED, "the forward whose result it is"),
        ("sampled_lens", "sampled_tokens"): Source(How.OBSERVED, "`ModelRunnerOutput.sampled_token_ids`"),
    },
    "request": {
        ("request_id",): Source(How.NUMBERED, "of the request's name"),
        ("name", "prompt_len"): Source(How.TOLD, "`NewRequestData`: req_id, prompt_token_ids"),
        ("room", "labels"): Source(How.ABSENT, "vLLM has no use for it"),
    },
    "status": {
        ("request_id", "req_pool_indices"): Source(How.NUMBERED, "the request's, and the row that it was given"),
        ("status", "note"): Source(
            How.TOLD,
            "the scheduler's methods where it runs in the process; else `SchedulerOutput`: finished, preempted",
        ),
    },
    "alloc": {
        USES["alloc"]: Source(How.TOLD, f"{_BLOCKS}: allocate_new_blocks, add_local_computed_blocks, cache_blocks"),
    },
    "free": {USES["free"]: Source(How.TOLD, f"{_BLOCKS}: free, remove_skipped_blocks")},
    "evict": {USES["evict"]: Source(How.TOLD, f"{_BLOCKS}: _maybe_evict_cached_block, reset_prefix_cache")},
    "sweep": {
        ("forward", "runner"): Source(How.NUMBERED, "the last forward begun before it"),
        SWEEPS: Source(How.TOLD, "the blocks that the prefix cache holds, as the slot history has them"),
    },
    "transfer": {
        USES["transfer"]: Source(
            How.TOLD, "the blocks that a KV connector loads, as receives without a room and without bytes"
        ),
    },
    "kv_copy": {
        ("request_id",): Source(How.ABSENT, "not told for whom: -1"),
        COPIES: Source(How.TOLD, "the blocks that the runner copies on write"),
        ("note",): Source(How.NUMBERED, "copy on write"),
    },
}
