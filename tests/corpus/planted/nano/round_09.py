"""A ninth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("kekzl/imp#538", "nano", "attention_table_overwritten", "req_to_token", origin="imp")
def table_that_begins_alike_is_not_sent(fired: Fired) -> None:
    """A decode's block table is not sent to the device if one is there that has as many blocks and begins with the same. A request that
    has hit that block decodes on the table of the one before it, and writes its token there, too."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    sent: dict[tuple[int, int], list[int]] = {}

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        made, context = before(runner, seqs), get_context()
        for row, seq in enumerate(seqs):
            own = seq.block_table
            last = sent.setdefault((len(own), own[0]), list(own))
            if last != own:
                context.block_tables[row, : len(last)] = context.block_tables.new_tensor(last)
                context.slot_mapping[row] = last[-1] * runner.block_size + seq.last_block_num_tokens - 1
                fired()
        return made
