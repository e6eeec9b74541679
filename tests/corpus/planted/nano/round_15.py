"""A fifteenth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("jundot/omlx#3414", "nano-chunks", "position_off", "future_map_overrun", origin="oMLX")
def paused_prompt_begins_again_behind_itself(fired: Fired) -> None:
    """A prompt is paused between two chunks, and what is left of it is kept as it was before the first. The first chunk's tokens are in the cache already and
    are fed once more behind themselves, and all that follows is as far from its place."""
    from nanovllm.engine.model_runner import ModelRunner

    paused: dict[int, int] = {}  # of a request, how many tokens its first chunk had

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        ids, positions = before(runner, seqs)
        at = 0
        for seq in seqs:
            start, count = seq.num_cached_tokens, seq.num_scheduled_tokens
            behind = paused.get(seq.seq_id, 0)
            if behind and start:
                fired()
                ids[at : at + count] = ids.new_tensor(seq[start - behind : start - behind + count])
            elif start + count < seq.num_tokens and not start:
                paused[seq.seq_id] = count
            at += count
        return ids, positions


@bug("NVIDIA/TensorRT-LLM#15461", "nano-page16", "attention_table_overwritten", origin="TensorRT-LLM")
def one_buffer_of_pointers_for_all_slots(fired: Fired) -> None:
    """Where the pages of a request lie goes to the device through one buffer that all slots share, and it is filled for a new request while the copy for an older
    one is under way. In that step the older one's attention looks through the new one's pages."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    new: set[int] = set()

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        new.update(seq.seq_id for seq in seqs)
        return before(runner, seqs)

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        made = before(runner, seqs)
        table = get_context().block_tables
        fresh = [row for row, seq in enumerate(seqs) if seq.seq_id in new]
        for row, seq in enumerate(seqs):
            other = next((one for one in fresh if len(seqs[one].block_table) >= len(seq.block_table)), row)
            if seq.seq_id not in new and other != row:
                fired()
                table[row] = table[other].clone()
        new.clear()
        return made
