"""A fifty-second round of public bugs made anew in mini-sglang on the CPU: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug("sgl-project/sglang#36926", "mini-withdrawn", "page_leaked", origin="SGLang")
def result_of_an_aborted_chunk_is_dropped_with_all_that_it_has(fired: Fired) -> None:
    """When a request is aborted while a chunk of its prompt is being computed, what it has is left for whoever gets the chunk's
    result to give back. Results of chunks that are aborted are dropped there without a look: its row, its pages and its lock
    on the prefix that it had hit are nobody's from then on."""
    from minisgl.scheduler.prefill import ChunkedReq, PrefillManager
    from minisgl.scheduler.scheduler import Scheduler

    aborted: list[Any] = []

    @replaces(PrefillManager, "abort_req")
    def abort_req(before, manager, uid):
        req = before(manager, uid)
        if isinstance(req, ChunkedReq):
            aborted.append(req)
        return req

    @replaces(Scheduler, "_free_req_resources")
    def _free_req_resources(before, scheduler, req):
        if req in aborted:
            fired()
        else:
            before(scheduler, req)


@bug("sgl-project/sglang-jax#1545", "mini-together", "attention_table_overwritten", origin="sglang-jax")
def pages_that_are_packed_are_read_as_if_each_request_had_as_many(fired: Fired) -> None:
    """For a step of several prompts the pages of all requests are put one behind another, without gaps. The kernel looks for each
    request's pages at its number times the most pages that one has: behind a request that has fewer, the next one
    attends to pages of those that come after it, or to page 0 where the list is over."""
    from minisgl.attention.fa import FlashAttentionBackend

    @replaces(FlashAttentionBackend, "prepare_metadata")
    def prepare_metadata(before, backend, batch):
        before(backend, batch)
        if not batch.is_prefill:
            return
        table = batch.attn_metadata.page_table
        counts = [-(-req.device_len // backend.page_size) for req in batch.padded_reqs]
        right = table.clone()
        packed = [page for row, count in zip(right.tolist(), counts, strict=True) for page in row[:count]]
        table.view(-1)[: len(packed)] = table.new_tensor(packed)
        table.view(-1)[len(packed) :] = 0
        if any((table[row, :count] != right[row, :count]).any() for row, count in enumerate(counts)):
            fired()


@bug(
    "sgl-project/sglang#4961",
    "mini-synced",
    "computed_with_other_weights",
    "not_of_the_model",
    origin="SGLang",
    late="not found: too few tokens come again for two sets of weights to be told apart without a model",
)
def graphs_hold_what_was_made_of_the_weights_before(fired: Fired) -> None:
    """Some of what the model computes with is put together of several of a checkpoint's weights when they are loaded. When weights are
    sent to the running engine it is put together anew, in another place in memory, and the graphs of decode steps still
    read the old place: prompts and larger steps are computed by the new weights, decode steps in part by the first ones."""
    from minisgl.engine.graph import GraphRunner

    import __main__ as engine

    held: list[tuple[Any, Any]] = []  # what is put together, and its weights that the graphs have

    @replaces(engine, "take_over")
    def take_over(before, model, weights):
        for layer in model.model.layers.op_list:
            for merged in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
                held.append((merged, merged.weight))
                merged.weight = merged.weight.clone()
        before(model, weights)

    @replaces(GraphRunner, "replay")
    def replay(before, runner, batch):
        new = [merged.weight for merged, _ in held]
        if held:
            fired()
        for merged, old in held:
            merged.weight = old
        logits = before(runner, batch)
        for (merged, _), weight in zip(held, new, strict=True):
            merged.weight = weight
        return logits
