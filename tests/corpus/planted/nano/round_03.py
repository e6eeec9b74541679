"""A third round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug(
    "microsoft/onnxruntime-genai#2354",
    "nano",
    "position_off",
    "prefix_not_computed",
    "slot_mapping",
    origin="onnxruntime-genai",
)
def decode_begins_one_too_far(fired: Fired) -> None:
    """The past length of a decode counts the token that it is about to compute. Its place, its position and attention's length
    are all one too far, and the slot in between is never written."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        ids, positions = before(runner, seqs)
        context = get_context()
        for row, seq in enumerate(seqs):
            if seq.last_block_num_tokens < runner.block_size:
                fired()
                positions[row] += 1
                context.slot_mapping[row] += 1
                context.context_lens[row] += 1
        return ids, positions


@bug("Wenyueh/MinivLLM#87", "nano-few", "slot_mapping", origin="MinivLLM")
def full_block_counts_nothing(fired: Fired) -> None:
    """The number of tokens in a last block that is full is worked out as none. The token that fills a block is written to the
    slot before the block's first, which is the end of another block."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        made = before(runner, seqs)
        for row, seq in enumerate(seqs):
            if seq.last_block_num_tokens == runner.block_size and seq.block_table[-1]:
                fired()
                get_context().slot_mapping[row] -= runner.block_size
        return made


@bug("scouzi1966/maclocal-api#140", "nano-page16", "kv_changed", "pad_rows_keep_last_blocks", origin="maclocal-api")
def finished_slot_decoded_again(fired: Fired) -> None:
    """A request that ends early keeps its lane of the batch, which is computed on and whose output nobody looks at. What it
    writes goes to blocks that others have by then."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler

    ended: list[int] = []
    hurt: list[int] = []

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        ended.append(seq.block_table[0])
        before(manager, seq)

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        seqs, prefills = before(scheduler)
        if hurt and any(hurt[0] in seq.block_table and seq.num_cached_tokens > 3 for seq in seqs):
            fired()
        return seqs, prefills

    @replaces(ModelRunner, "run_model")
    def run_model(before, runner, *args: Any):
        done = before(runner, *args)
        held = runner_blocks(runner)
        again = [block for block in ended if block in held]
        if again and not hurt:
            hurt.append(again[0])
            runner.kv_cache[:, :, again[0], 3] = 0.25
        return done

    def runner_blocks(runner: Any) -> set[int]:
        seqs = runner.schedules.running if hasattr(runner, "schedules") else []
        return {block for seq in seqs for block in seq.block_table if seq.num_cached_tokens > 3}

    from nanovllm.engine.llm_engine import LLMEngine

    @replaces(LLMEngine, "step")
    def step(before, llm):
        llm.model_runner.schedules = llm.scheduler
        return before(llm)
