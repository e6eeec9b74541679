"""Public bugs made anew in vLLM 0.32 on the CPU: its batch, block tables, slots, attention metadata and drafter."""

import itertools

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm#46460", "llama", "attention_seq_len_wrong")
def attention_without_prefix(fired: Fired) -> None:
    """The attention metadata of a prefill is built from the new tokens alone. The cached prefix is there and right, and
    attention never looks at it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        starts = common.query_start_loc
        lens = (starts[1:] - starts[:-1])[: len(common.seq_lens)]
        wrong = (lens > 1) & (lens < common.seq_lens)
        if bool(wrong.any()):
            fired()
            common = common.replace(seq_lens=common.seq_lens.where(~wrong, lens.to(common.seq_lens.dtype)))
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("LMCache/LMCache#4921", "llama", "slot_mapping", origin="LMCache")
def absolute_slots(fired: Fired) -> None:
    """A slot mapping that begins behind the cached prefix is indexed with absolute positions, so that each token of a later
    chunk goes to the slot of one further on. Attention reads the slots that the row names."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        ends = starts[: num_reqs + 1].tolist()
        for first, end in itertools.pairwise(ends):
            offset = int(positions[first])
            if end - first > 4 and offset:
                slots = table.slot_mapping.gpu
                slots[first : end - 3] = slots[first + 3 : end].clone()
                fired()


@bug("vllm-project/vllm#48419", "llama-churn", "req_to_token")
def swap_through_views(fired: Fired) -> None:
    """Two requests of the batch change places by a swap of views, which leaves both rows with the second one's contents.
    The first reads the other's K and V."""
    done: list[int] = []

    def look(runner, output):
        batch = runner.input_batch
        table = batch.block_table[0]
        if batch.num_reqs > 1 and not done and min(batch.num_computed_tokens_cpu[:2]) > 33:
            done.append(1)
            held = table.num_blocks_per_row[0]
            table.block_table.np[0, :held] = table.block_table.np[1, :held]
            fired()

    before_forward(look)


@bug("vllm-project/vllm#43894", "llama-churn", "req_to_token")
def recycled_row(fired: Fired) -> None:
    """A row of the batch that a request has left keeps its count of entries. The next request's blocks are appended behind
    the old ones, and it reads through those."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "add_row")
    def add_row(before, table, block_ids, row):
        before(table, block_ids, row)
        if getattr(table, "left", None) and len(block_ids) > 1 and table.left[0] not in block_ids:
            table.block_table.np[row, 0] = table.left[0]
            table.left = None
            fired()

    @replaces(BlockTable, "clear_row")
    def clear_row(before, table, row):
        if table.num_blocks_per_row[row]:
            table.left = table.block_table.np[row, :2].tolist()
        before(table, row)


@bug("NVIDIA/TensorRT-LLM#13320", "llama-churn", "commit_beyond_allocation", "req_to_token", origin="TensorRT-LLM")
def decode_blocks_missing(fired: Fired) -> None:
    """A decode that comes to a block's end is given no new block, since its list of blocks is no longer looked at. Its
    tokens go to the placeholder block 0, and are read from there."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "append_row")
    def append_row(before, table, block_ids, row):
        if len(block_ids) == 1 and table.num_blocks_per_row[row] > 1:
            table.num_blocks_per_row[row] += 1
            table.block_table.np[row, table.num_blocks_per_row[row] - 1] = 0
            fired()
            return
        before(table, block_ids, row)


@bug("ggml-org/llama.cpp#12253", "llama", "kv_changed", origin="llama.cpp")
def defragmented_in_flight(fired: Fired) -> None:
    """Defragmentation copies a block over another that it takes for free, while a batch that reads it has been put
    together. The reader finds another's K and V."""
    done: list[int] = []

    def look(runner, output):
        batch = runner.input_batch
        table = batch.block_table[0]
        if batch.num_reqs > 1 and not done and min(batch.num_computed_tokens_cpu[:2]) > 40:
            done.append(1)
            one, other = int(table.block_table.np[0, 0]), int(table.block_table.np[1, 0])
            if one == other:
                one, other = int(table.block_table.np[0, 1]), int(table.block_table.np[1, 1])
            for cache in runner.kv_caches:
                cache[one].copy_(cache[other])
            fired()

    before_forward(look)


@bug("NVIDIA/TensorRT-LLM#15546", "llama-churn", "attention_table_overwritten", origin="TensorRT-LLM")
def table_overwritten_in_flight(fired: Fired) -> None:
    """The pinned table of the next batch is filled while the copy of this one's is under way. Attention gets a row that is
    not its batch's, and the scheduler's own table is right."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    steps: list[int] = []

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        lens = common.seq_lens.tolist()
        if len(lens) > 1 and min(lens[:2]) > 40:
            steps.append(1)
            if len(steps) == 3:
                metadata.block_table = metadata.block_table.clone()
                metadata.block_table[0] = metadata.block_table[1]
                fired()
        return metadata


@bug("vllm-project/vllm#42971", "llama-eagle", "shared_page_written", "slot_mapping")
def drafter_writes_prefix(fired: Fired) -> None:
    """Positions past the longest that the draft model knows are clamped to 0 for its slot mapping. Drafted tokens are
    written to the first slot of their request's table, which is a shared prefix block."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    seen: list = []
    before_forward(lambda runner, output: seen.append(runner))

    @replaces(SpecDecodeBaseProposer, "_get_slot_mapping")
    def _get_slot_mapping(before, proposer, *args, **kwargs):
        mapping = before(proposer, *args, **kwargs)
        for slots in {id(s): s for s in mapping.values()}.values():
            if 1 < len(slots) < 5 and int(slots[-1]) > 0 and len(seen) > 8:
                table = seen[-1].input_batch.block_table[0]
                slots[-1] = int(table.block_table.np[len(slots) - 1, 0]) * table.block_size
                fired()
        return mapping


@bug("waybarrios/vllm-mlx#311", "llama", "slot_mapping", origin="vllm-mlx")
def decode_one_further(fired: Fired) -> None:
    """A cached length that is one short leaves a gap: from then on tokens are stored one slot further on than the request
    reads them. The slot of the token itself keeps what stood there."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        counts = (starts[1 : num_reqs + 1] - starts[:num_reqs]).tolist()
        at = num_reqs - 1
        if num_reqs > 1 and set(counts) == {1} and int(positions[at]) % table.block_size < table.block_size - 1:
            table.slot_mapping.gpu[at] += 1
            fired()
