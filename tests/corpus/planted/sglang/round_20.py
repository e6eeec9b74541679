"""A twentieth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#36739", "llama-no-tree", "double_free", "page_given_twice", "free_too_early")
def what_was_held_back_is_given_back_twice(fired: Fired) -> None:
    """While a batch's results are gone through, what is freed is held in a list and given back at the end, and whether it is held is told by a flag beside the list. The end comes
    twice, and the flag has been cleared but the list has not: the same slots go back once more, and two requests get them."""
    import torch
    from sglang.srt.mem_cache.allocator import base

    listed: set[int] = set()
    owner: dict[int, str] = {}  # who wrote a slot last

    @replaces(base.BaseTokenToKVPoolAllocator, "free_group_end")
    def free_group_end(before, allocator):
        held = list(allocator.free_group or ())
        before(allocator)
        if held:
            again = torch.cat(held)
            listed.update(again.tolist())
            allocator.free(again)

    def look(runner, batch, rows):
        at = 0
        for name, (prefix, end, _) in zip(batch.rids, rows, strict=True):
            owner.update(dict.fromkeys(batch.out_cache_loc[at : at + end - prefix].tolist(), name))
            at += end - prefix
        for name, (_, _, slots) in zip(batch.rids, rows, strict=True):
            if any(slot in listed and owner.get(slot, name) != name for slot in slots):
                fired()

    before_forward(look)


@bug(
    "sgl-project/sglang-omni#1027",
    "llama-mixed",
    "slot_mapping",
    "kv_write_lost",
    "req_to_token",
    origin="SGLang Omni",
)
def slots_of_a_mixed_batch_are_cut_anew_by_its_rows(fired: Fired) -> None:
    """The slots of a step are cut anew when its rows are looked through, one for each row and in the order of a batch of decodes. A batch has a prefill and decodes together, and
    its decodes' slots come first while their tokens come last: each token goes where another was to go."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_mixed():
            counts = batch.extend_seq_lens.tolist()
            tails = next((n for n, count in enumerate(reversed(counts)) if count != 1), len(counts))
            if 0 < tails < len(counts):
                fired()
                slots = batch.out_cache_loc
                batch.out_cache_loc = slots.roll(tails)
        return before(runner, batch, *args, **kwargs)


@bug(
    "sgl-project/sglang#16103",
    "llama-retract",
    "position_off",
    "async_resume_wrong_input",
    "prefix_not_computed",
    late="that a resumed request is extended by less than it has is not looked at",
)
def resumed_request_is_extended_by_its_prompt_alone(fired: Fired) -> None:
    """How many tokens a retracted request has to compute anew is counted from its prompt, without what it has answered. It goes on behind its prompt as if it had said nothing, and
    its next token stands where its first one did."""
    from sglang.srt.managers.schedule_batch import Req

    wrong: set[str] = set()

    @replaces(Req, "refresh_fill_ids")
    def refresh_fill_ids(before, req):
        if req.is_retracted and len(req.output_ids) and not req.kv.holds_kv:
            wrong.add(req.rid)
            req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids[:0]
            return
        before(req)

    before_forward(lambda runner, batch, rows: wrong & set(batch.rids) and fired())


def _decode_lengths(change) -> None:
    """Give attention other lengths in a forward of decodes: `change(runner, batch, lengths)` returns them."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "_forward_raw")
    def _forward_raw(before, runner, batch, *args, **kwargs):
        if not batch.forward_mode.is_decode():
            return before(runner, batch, *args, **kwargs)
        kept = batch.seq_lens
        batch.seq_lens = kept.new_tensor(change(runner, batch, kept.tolist()))
        try:
            return before(runner, batch, *args, **kwargs)
        finally:
            batch.seq_lens = kept


@bug("sgl-project/sglang#26020", "llama-overlap", "attention_seq_len_wrong")
def lengths_are_counted_up_by_the_step_as_well(fired: Fired) -> None:
    """The lengths of a batch are counted up by the scheduler, and in some modes by the step that it has launched, which gets the same tensor. Now and then, when a batch of decodes
    goes on unchanged, both have done it before attention reads them: it looks one token further than has been written."""
    steps: dict[tuple, int] = {}

    def change(runner, batch, lengths):
        names = tuple(batch.rids)
        steps[names] = steps.get(names, 0) + 1
        if steps[names] % 4:
            return lengths
        fired()
        return [length + 1 for length in lengths]

    _decode_lengths(change)


@bug("sgl-project/sglang#35401", "llama-page16", "attention_seq_len_wrong")
def rest_of_the_last_page_is_read_from_the_row(fired: Fired) -> None:
    """The allocator gives whole pages, and the row is written as far as the request has tokens. A decode that goes by whole pages reads the row to its last page's end, where it
    names what the row's last owner had there."""

    def change(runner, batch, lengths):
        table, size = runner.req_to_token_pool.req_to_token, 16
        for place, (row, end) in enumerate(zip(batch.req_pool_indices.tolist(), list(lengths), strict=True)):
            whole = -(-end // size) * size
            if bool((table[row, end:whole] > 0).any()):  # somebody had the row before
                fired()
                lengths[place] = whole
        return lengths

    _decode_lengths(change)
