"""Where SGLang's columns come from, on the CPU and on a GPU; see `observed`."""

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
    Columns,
    How,
    Source,
    Table,
)

_ALLOCATOR: Final = "the arguments and results of the allocator's alloc and free methods"
_CALLED: Final = (
    "of the batch that the model is called with, right before its first layer (when `ModelRunner._forward_raw` is called, "
    "where the model is compiled or never called)"
)
_EVENTS: Final[dict[str, dict[Columns, Source]]] = {
    "sample": {
        ("forward",): Source(How.NUMBERED, "the forward whose result it is"),
        ("sampled_lens", "sampled_tokens"): Source(
            How.OBSERVED, "the result that `Scheduler.process_batch_result` takes over: next_token_ids"
        ),
    },
    "request": {
        ("request_id",): Source(How.NUMBERED, "in the order seen; where the hash oracle samples, of the rid"),
        ("name", "prompt_len", "room"): Source(How.TOLD, "`Req`: rid, origin_input_ids, bootstrap_room"),
        ("labels",): Source(How.ABSENT, "SGLang has no use for it"),
    },
    "status": {
        ("request_id",): Source(How.NUMBERED, "the request's"),
        ("status", "note"): Source(
            How.DERIVED,
            "from the request's row: a row that is given back before the request has finished is a retraction "
            "inside `retract_decode`, else an abort",
        ),
        ("req_pool_indices",): Source(How.TOLD, "`Req`: its row of req_to_token"),
    },
    "alloc": {
        ("request_id", "req_pool_indices"): Source(
            How.DERIVED,
            "the request of the forward that first writes the slot: an allocator does not know for whom it gives",
        ),
        SLOTS: Source(How.TOLD, f"{_ALLOCATOR}, told when a forward first writes them"),
        ("status", "note"): Source(How.NUMBERED, "fresh: shared slots are not told"),
    },
    "free": {
        ("request_id", "req_pool_indices"): Source(How.ABSENT, "the allocator does not know whose they were: -1"),
        SLOTS: Source(How.TOLD, f"{_ALLOCATOR}, when the free is asked for, even where the engine puts it off"),
        ("note",): Source(How.NUMBERED, "which function was called"),
    },
    "evict": {
        ("request_id", "req_pool_indices"): Source(How.ABSENT, "nobody's: -1"),
        SLOTS: Source(How.TOLD, f"{_ALLOCATOR}, called inside the prefix cache's evict or by a flush"),
        ("note",): Source(How.NUMBERED, "which function was called"),
    },
    "sweep": {
        ("forward", "runner"): Source(How.NUMBERED, "the last forward begun before it"),
        SWEEPS: Source(How.TOLD, "the prefix cache's tree, node by node, through the full-to-SWA table"),
    },
    "transfer": {
        ("runner", "request_id"): Source(How.NUMBERED, "the group's, the request's"),
        ("req_pool_indices", "prefix_lens"): Source(How.TOLD, "`Req`: its row; where its first chunk began"),
        ("room", "peer", "mode", "status", "num_bytes", "note"): Source(
            How.TOLD, "`Req` and its sender or receiver, whose polls say when it is over"
        ),
        SLOTS: Source(How.OBSERVED, "req_to_token (and the full-to-SWA table) of the positions that are sent"),
    },
    "kv_copy": {
        ("request_id",): Source(How.ABSENT, "the host cache does not know for whom: -1"),
        COPIES: Source(How.TOLD, "the arguments of the host cache's backup and load methods"),
        ("note",): Source(How.NUMBERED, "offload or load-back"),
    },
}

CPU: Final[Table] = {
    "forward": {
        ("runner", "mode"): Source(How.TOLD, "which `ModelRunner`; `ForwardBatch.forward_mode`"),
        ("req_pool_indices",): Source(How.OBSERVED, f"`ForwardBatch.req_pool_indices`, {_CALLED}"),
        ("request_ids",): Source(How.NUMBERED, "of `ForwardBatch.rids`"),
        ("prefix_lens",): Source(
            How.OBSERVED,
            "decode: `ForwardBatch.positions`, by definition; target-verify: seq_lens; extends: "
            "extend_prefix_lens; draft extends: seq_lens less extend_seq_lens",
        ),
        ("extend_lens",): Source(
            How.OBSERVED,
            "extend_seq_lens; 1 in a decode; the draft's number of tokens in a target-verify, by definition",
        ),
        ("input_ids", "positions", "out_cache_loc"): Source(
            How.OBSERVED,
            f"`ForwardBatch`'s tensors of that name, {_CALLED}; -1 for tokens of embeddings",
        ),
        ("sampled_lens", "sampled_tokens"): Source(
            How.OBSERVED, "the result that `Scheduler.process_batch_result` takes over"
        ),
        TABLE_RUNS: Source(How.OBSERVED, "`req_to_token_pool.req_to_token`, the cells that the forward reads"),
        LUT_RUNS: Source(How.OBSERVED, "the pool's full_to_swa_index_mapping"),
        TRUTH_RUNS: Source(
            How.TOLD, "`Req.origin_input_ids` and `output_ids`, when the forward is told; -1 for embeddings and beams"
        ),
        ATTENTION: Source(
            How.OBSERVED,
            "of `torch_native` and `intel_amx` the batch's seq_lens and extend_seq_lens (a decode computes one token each, a "
            "verify forward has its drafted tokens on top), and the rows of req_to_token that they read, before the first "
            "layer and after the last; of their sliding layers no slots, of other backends nothing, as the header says",
        ),
        SUBMITTED: Source(How.ABSENT, "what the model hands to the pool is not read"),
    },
    **_EVENTS,
}

GPU: Final[Table] = {
    **CPU,
    "forward": {
        **CPU["forward"],
        ATTENTION: Source(
            How.OBSERVED,
            "kv_indptr, kv_indices, qo_indptr and the window's, of `TritonAttnBackend`, where the model's first layer "
            "begins, in its CUDA graph too; of other backends nothing",
        ),
        ("input_ids", "positions", "out_cache_loc"): Source(
            How.OBSERVED,
            "the arguments that the model is called with, where its first layer begins, inside its CUDA graphs too (SGLang "
            "0.5.16 on); else `ForwardBatch`'s tensors, copied on the forward's stream before it. Of EAGLE's draft steps in a "
            "graph that is not seen from inside derived, which the header says",
        ),
        TABLE_RUNS: Source(
            How.OBSERVED, "`req_to_token_pool.req_to_token`, compared on the device, on the forward's stream"
        ),
    },
}
