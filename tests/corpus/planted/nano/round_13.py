"""A thirteenth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("hw-native-sys/pypto-lib#274", "nano-few", "prefix_not_computed", origin="pypto-lib")
def resumed_with_its_prompt_alone(fired: Fired) -> None:
    """A request that is preempted keeps the tokens that it has said, and of what was freed it computes the prompt alone when it comes back. It
    goes on behind its answer, whose places nobody has filled."""
    from nanovllm.engine.scheduler import Scheduler

    short: set[int] = set()
    gaps: set[int] = set()

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        seqs, prefill = before(scheduler)
        for seq in seqs if prefill else ():
            left = seq.num_prompt_tokens - seq.num_cached_tokens
            last = seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens
            if last and 0 < left < seq.num_scheduled_tokens:
                seq.num_scheduled_tokens = left
                short.add(seq.seq_id)
        if gaps & {seq.seq_id for seq in seqs}:
            fired()
        return seqs, prefill

    @replaces(Scheduler, "postprocess")
    def postprocess(before, scheduler, seqs, tokens, prefill):
        for seq in seqs:
            if seq.seq_id in short:
                short.discard(seq.seq_id)
                gaps.add(seq.seq_id)
                scheduler.block_manager.hash_blocks(seq)
                seq.num_cached_tokens, seq.num_scheduled_tokens = seq.num_tokens, 0
        before(scheduler, seqs, tokens, prefill)


@bug(
    "gittensor-ai-lab/sparkinfer#144",
    "nano",
    "attention_table_overwritten",
    "slot_mapping",
    "row_reassigned_in_flight",
    origin="sparkinfer",
)
def rows_of_the_batch_taken_for_slots(fired: Fired) -> None:
    """The tables stand in the slots that requests were given when they came, and the kernels count through them by rows of the batch. When one
    before it has left, a request is computed on another's table: it writes there and reads there."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    slots: dict[int, object] = {}

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        slots[min(set(range(len(slots) + 1)) - slots.keys())] = seq

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        for slot in [slot for slot, held in slots.items() if held is seq]:
            del slots[slot]
        before(manager, seq)

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        made, context, size = before(runner, seqs), get_context(), runner.block_size
        for row, seq in enumerate(seqs):
            other = slots.get(row, seq)
            place = (len(seq) - 1) // size
            if other is seq or place >= len(other.block_table):
                continue
            fired()
            width = min(context.block_tables.shape[1], len(other.block_table))
            context.block_tables[row, :width] = context.block_tables.new_tensor(other.block_table[:width])
            context.slot_mapping[row] = other.block_table[place] * size + (len(seq) - 1) % size
        return made


@bug("Comfy-Org/ComfyUI#15698", "nano", "position_off", origin="ComfyUI")
def positions_behind_the_padding(fired: Fired) -> None:
    """Prompts of several lengths are padded to the longest, and the cache keeps the length of each. Decodes write at their own place, and get
    the position behind the padding: all but the longest leave out as many as they were padded with."""
    from nanovllm.engine.model_runner import ModelRunner

    padded: dict[int, int] = {}

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        longest = max(len(seq) for seq in seqs)
        padded.update((seq.seq_id, longest - len(seq)) for seq in seqs)
        return before(runner, seqs)

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        ids, positions = before(runner, seqs)
        for row, seq in enumerate(seqs):
            if padded.get(seq.seq_id):
                fired()
                positions[row] += padded[seq.seq_id]
        return ids, positions
