"""A thirtieth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


def once_it_reads_what_others_wrote(fired: Fired) -> None:
    """Say that the damage is read by the first forward with a prefix whose slots were not written one behind the other."""
    written: dict[int, tuple[int, int]] = {}  # of each slot: what stood in front when it was written, and with it

    def look(runner, batch, rows):
        tokens, slots = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        table = runner.req_to_token_pool.req_to_token
        at = 0
        for past, end, prefix in rows:
            front = written.get(prefix[-1], (0, 0))[1] if prefix else 0
            for token, slot in zip(tokens[at : at + end - past], slots[at : at + end - past], strict=True):
                written[slot] = (front, hash((front, token)))
                front = written[slot][1]
            at += end - past
        for row, (_, end, _) in zip(batch.req_pool_indices.tolist(), rows, strict=True):
            front = 0
            for slot in table[row, :end].tolist():
                before, after = written.get(slot, (-1, -1))
                if before != front:
                    fired()
                front = after

    before_forward(look)


@bug(
    "sgl-project/sglang#23392",
    "llama-page4-abort",
    "radix_insert_then_free",
    "free_too_early",
    "stale_prefix_hit",
)
def aborted_prompt_gives_back_what_the_tree_has(fired: Fired) -> None:
    """A prompt is sent away between two chunks, the first of which are in the tree by then. All of its row is given back, from the first slot on and not from where its own part begins: others write over the prefix,
    and who asks the same again hits it."""
    from sglang.srt.managers import scheduler

    @replaces(scheduler, "release_kv_cache")
    def release_kv_cache(before, req, tree_cache, *, checkpoint):
        if not checkpoint and req.kv.holds_kv:
            req.kv.cache_protected_len = 0
        return before(req, tree_cache, checkpoint=checkpoint)

    once_it_reads_what_others_wrote(fired)


@bug("huggingface/transformers#43082", "hybrid-page8-chunks", "position_off", origin="transformers")
def positions_are_those_within_the_chunk(fired: Fired) -> None:
    """A prompt is computed in chunks, and each chunk is given positions of its own: those behind the first one begin at 0 again, and are turned as if nothing stood in front of them. Prompts of one chunk are right."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor import forward_batch_info

    goes_on: list[bool] = []  # of each request of the batch

    @replaces(ScheduleBatch, "prepare_for_extend")
    def prepare_for_extend(before, batch, *args, **kwargs):
        result = before(batch, *args, **kwargs)
        goes_on[:] = [req.extend_batch_idx > 1 for req in batch.reqs]
        return result

    @replaces(forward_batch_info, "compute_position_torch")
    def compute_position_torch(before, extend_prefix_lens, extend_seq_lens):
        if not any(goes_on):
            return before(extend_prefix_lens, extend_seq_lens)
        fired()
        within = [0 if again else n for n, again in zip(extend_prefix_lens.tolist(), goes_on, strict=True)]
        return before(extend_prefix_lens.new_tensor(within), extend_seq_lens)


@bug("sgl-project/sglang#18694", "llama-overlap-retract-no-tree", "double_free", "page_given_twice")
def request_that_has_finished_is_retracted_too(fired: Fired) -> None:
    """A request has finished and has given its slots back, and is still in the batch when others have to make room. It is retracted like one that runs, and its slots are given back a second time: two requests get
    the same ones."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components import batch_result_processor

    done: list = []  # slots of requests that have finished since the last forward

    @replaces(batch_result_processor, "release_kv_cache")
    def release_kv_cache(before, req, tree_cache, *, checkpoint):
        if req.finished() and req.kv.holds_kv:
            table = tree_cache.req_to_token_pool.req_to_token
            done.append(table[req.kv.req_pool_idx, : req.owned_kv_len()].clone())
        return before(req, tree_cache, checkpoint=checkpoint)

    @replaces(ScheduleBatch, "retract_decode")
    def retract_decode(before, batch):
        result = before(batch)
        for slots in done:
            batch.token_to_kv_pool_allocator.free(slots)
        done.clear()
        return result

    before_forward(lambda runner, batch, rows: done.clear())
    once_it_reads_what_others_wrote(fired)


@bug("vllm-project/vllm#9910", "llama-overlap-page8-short", "next_token_swap", origin="vllm")
def rows_of_sampled_tokens_stay_when_a_request_leaves(fired: Fired) -> None:
    """The batch remembers in which rows the last tokens were put, and does not move them up when a request leaves. In the next step those behind it go on with the token of the one in front of them; after that they
    have their own again."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    stale: dict[int, list[int]] = {}  # of a batch: the rows before somebody left

    def rows_of(batch) -> list[int]:
        rows = stale.pop(id(batch), None)
        return (batch.req_pool_indices.tolist() if rows is None else rows)[: len(batch.reqs)]

    @replaces(ScheduleBatch, "filter_batch")
    def filter_batch(before, batch, *args, **kwargs):
        rows, count = batch.req_pool_indices, len(batch.reqs)
        before(batch, *args, **kwargs)
        if 0 < len(batch.reqs) < count:
            stale.setdefault(id(batch), rows.tolist())

    @replaces(ScheduleBatch, "merge_batch")
    def merge_batch(before, batch, other):
        known = id(batch) in stale or id(other) in stale
        rows = rows_of(batch) + rows_of(other) if known else []
        before(batch, other)
        if known:
            stale[id(batch)] = rows

    @replaces(scheduler, "resolve_forward_inputs")
    def resolve_forward_inputs(before, batch, future_map):
        rows = rows_of(batch)
        if batch.prefill_input_ids_cpu is None and batch.input_ids is None:
            before(batch, future_map)
            right, batch.input_ids = batch.input_ids, future_map.output_tokens_buf[rows]
            if not batch.input_ids.equal(right):
                fired()
            return
        before(batch, future_map)
