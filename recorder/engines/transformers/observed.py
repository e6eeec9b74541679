"""Where the columns of Hugging Face transformers' continuous batching come from; see `observed`."""

from typing import Final

from ..common.observed import ATTENTION, COPIES, LUT_RUNS, SUBMITTED, TABLE_RUNS, TRUTH_RUNS, USES, How, Source, Table

_IO: Final = "the batch's inputs and outputs, when `_generation_step` is called"
TRANSFORMERS: Final[Table] = {
    "forward": {
        ("runner",): Source(How.NUMBERED, "there is one, 0"),
        ("mode",): Source(How.DERIVED, "from lengths; a label, by which nothing is judged"),
        ("req_pool_indices", "request_ids"): Source(How.NUMBERED, "in the order seen: transformers has no rows"),
        ("prefix_lens", "extend_lens"): Source(How.TOLD, "each request's position_offset and query_length"),
        ("input_ids", "positions"): Source(How.OBSERVED, f"{_IO}: input_ids, position_ids"),
        ("out_cache_loc",): Source(
            How.OBSERVED,
            f"{_IO}: write_index; on the decode path whose kernel walks the block table, the allocator's answer",
        ),
        ("sampled_lens", "sampled_tokens"): Source(How.OBSERVED, "output_ids, after the step"),
        TABLE_RUNS: Source(
            How.OBSERVED,
            f"{_IO}: the allocator's block table; of a sliding window read_index, cut by cumulative_seqlens_k, and the slot "
            "before it by the block table",
        ),
        LUT_RUNS: Source(How.ABSENT, "transformers has no such table: each group has its own blocks"),
        TRUTH_RUNS: Source(How.TOLD, "the request's initial_tokens and generated_tokens"),
        ATTENTION: Source(
            How.OBSERVED,
            f"{_IO}: cumulative_seqlens_q and cumulative_seqlens_k (a window's length counts as the request's, less or more "
            "by as much), read_index of full-attention layers; nothing on the decode path whose kernel walks the block table",
        ),
        SUBMITTED: Source(
            How.OBSERVED, "the key and value states that the cache's update is called with, of the layers captured"
        ),
    },
    "sample": {USES["sample"]: Source(How.ABSENT, "sampled tokens come with their forward")},
    "request": {
        ("request_id",): Source(How.NUMBERED, "of the request's name"),
        ("name", "prompt_len", "labels"): Source(How.TOLD, "the request's id and initial_tokens; of a fork its parent"),
        ("room",): Source(How.ABSENT, "transformers has no use for it"),
    },
    "status": {USES["status"]: Source(How.ABSENT, "requests' rows are the recorder's own numbers")},
    "alloc": {
        USES["alloc"]: Source(
            How.TOLD,
            "blocks that are new in a request's block table when a step begins, or a fork's; shared where the block "
            "has a hash",
        ),
    },
    "free": {
        USES["free"]: Source(How.TOLD, "a request's block table when it is dropped, and what de-duplication replaced")
    },
    "evict": {USES["evict"]: Source(How.TOLD, "cached blocks that the pool took back")},
    "sweep": {USES["sweep"]: Source(How.ABSENT, "the prefix cache is not walked")},
    "transfer": {USES["transfer"]: Source(How.ABSENT, "transformers has no prefill and decode sides")},
    "kv_copy": {
        ("request_id",): Source(How.NUMBERED, "the request's"),
        COPIES: Source(How.TOLD, "the blocks that the cache copies for a fork, offloads and loads back"),
        ("note",): Source(How.NUMBERED, "fork, offload or load-back"),
    },
}
