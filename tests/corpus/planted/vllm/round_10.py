"""A tenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import itertools
import shutil
import sys

from bugs import Fired, bug, replaces

from .marks import before_forward, reads, when_allocated


@bug("vllm-project/vllm#57260", "hybrid", "slot_mapping", "kv_write_lost")
def shared_out_among_ranks_that_each_have_it_all(fired: Fired) -> None:
    """Slots are worked out as if each of two ranks kept every other token, for a sliding group too, of which a rank keeps all. Half of
    the tokens are not written, and the others go to a slot that is not the row's."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec
    from vllm.v1.worker.block_table import BlockTable

    sliding: set[int] = set()

    def look(runner, output):
        for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            if isinstance(group.kv_cache_spec, SlidingWindowSpec):
                sliding.add(id(runner.input_batch.block_table[gid]))

    before_forward(look)

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        if id(table) not in sliding:
            return
        fired()
        for row, (first, end) in enumerate(itertools.pairwise(starts[: num_reqs + 1].tolist())):
            for at in range(first, end):
                place, offset = divmod(int(positions[at]), 2 * table.block_size)
                slot = int(table.block_table.gpu[row, place]) * table.block_size + offset // 2
                table.slot_mapping.gpu[at] = -1 if offset % 2 else slot


@bug("vllm-project/vllm#51667", "llama-loads-two", "load_of_other_prefix")
def buffer_filled_before_it_was_copied(fired: Fired) -> None:
    """Blocks come from a disk through two buffers in turn, and a load ends without waiting for the last copies out of them. The next load
    reads its first block into a buffer that is still being copied, and the block of the load before gets that."""
    import host_connector

    @replaces(host_connector.HostConnector, "start_load_kv")
    def start_load_kv(before, connector, *args, **kwargs):
        before(connector, *args, **kwargs)
        for job, following in itertools.pairwise(connector._get_connector_metadata().loads):
            gid, block, key = job.blocks[(len(job.blocks) - 1) // 2 * 2]
            other = following.blocks[0][2]
            if other != key:
                fired()
                for name, rows in connector._blocks_of(gid, block):
                    rows.copy_(connector._store[name, other])


@bug("vllm-project/vllm#48412", "llama", "kv_changed", "kv_write_damaged")
def scales_written_with_one_layers_stride(fired: Fired) -> None:
    """The scale of each token and head is written through a view that was made for a layer's own buffer, and the buffer is one for all
    layers, without room for scales. Each lands on K or V of other tokens, in a block of a lower number."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    caches: list = []
    written: set[int] = set()
    damaged: set[int] = set()

    def look(runner, output):
        caches[:] = runner.kv_caches
        batch, layers = runner.input_batch, len(caches)
        table = batch.block_table[0]
        for row, name in enumerate(batch.req_ids):
            first = int(batch.num_computed_tokens_cpu[row])
            last = first + output.num_scheduled_tokens.get(name, 0) - 1
            for place in range(first // table.block_size, last // table.block_size + 1):
                block = int(table.block_table.np[row, place])
                damaged.update({block // layers} & written)
                written.add(block)
        if reads(runner, output, damaged):
            fired()

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, kv_cache, slot_mapping):
        before(impl, layer, key, value, kv_cache, slot_mapping)
        _, heads, size, width = kv_cache.shape
        width, layers = width // 2, len(caches)
        for number, slot in enumerate(slot_mapping.tolist()):
            block, at = divmod(slot, size)
            for head, (half, rows) in itertools.product(range(heads), enumerate((key, value))):
                place = ((2 * head + half) * size + at) * (width + 1) + width
                if layers and block >= layers and place < 2 * heads * size * width:
                    region = caches[block % layers][block // layers].view(-1)
                    region[place] = rows[number, head].abs().max() / 127


@bug("vllm-project/vllm-ascend#14040", "llama-few", "attention_table_overwritten", origin="vLLM Ascend")
def two_blocks_read_by_their_addresses(fired: Fired) -> None:
    """Two blocks of a row are read by one copy, which begins at the lower address. If the second block lies before the first, attention
    gets them in one another's places."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        rows = metadata.block_table.clone()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            for first in range(0, -(-length // builder.block_size) - 1, 2):
                rows[row, first : first + 2] = rows[row, first : first + 2].sort().values
        if not rows.equal(metadata.block_table):
            fired()
            metadata.block_table = rows
        return metadata


@bug("vllm-project/tpu-inference#2469", "recurrent", "state_restored_for_other_prefix", origin="tpu-inference")
def padding_puts_the_old_state_back(fired: Fired) -> None:
    """A request moves down in the batch, and the row that it has left keeps the slot of its recurrent state. That row is padding now, which
    puts back the state that it has read, over the one that the request has just written."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.short_conv import ShortConv
    from vllm.v1.worker.gpu_input_batch import InputBatch

    left: dict[str, int] = {}
    rows: list[int] = []
    lost: set[str] = set()

    @replaces(InputBatch, "condense")
    def condense(before, batch):
        names = list(batch._req_ids)
        before(batch)
        left.update({name: names.index(name) for row, name in enumerate(batch._req_ids) if name and names[row] != name})

    def look(runner, output):
        batch = runner.input_batch
        if lost & set(output.num_scheduled_tokens):
            fired()
        padding = [name for name, row in left.items() if name in batch.req_id_to_index and row >= batch.num_reqs]
        rows[:] = [batch.req_id_to_index[name] for name in padding]
        lost.update(padding)

    before_forward(look)

    @replaces(ShortConv, "forward_native")
    def forward_native(before, layer, *args, **kwargs):
        metadata = get_forward_context().attn_metadata
        own = metadata[layer.prefix] if metadata is not None else None
        decodes = [row for row in rows if own is not None and row < own.num_decodes]
        slots = own.state_indices_tensor_d.flatten()[decodes] if decodes else []
        states = layer.kv_cache[0]
        stood = states[slots].clone() if decodes else None
        before(layer, *args, **kwargs)
        if decodes:
            states[slots] = stood


@bug("vllm-project/vllm#42125", "llama-lora", "identity_not_in_key", "cache_kept_over_new_weights")
def adapter_loaded_anew_in_its_place(fired: Fired) -> None:
    """An adapter is loaded anew in its place, with the same name, number and path, and other weights. Its blocks in the prefix cache keep
    their keys, and requests hit what the old weights have computed."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler

    engine = sys.modules["__main__"]
    made: list = []
    old: set[int] = set()

    @replaces(engine, "adapter")
    def adapter(before, folder, number):
        made.append(before(folder, number))
        return made[0] if number == 1 else LoRARequest("tenant", 1, made[0].lora_path, load_inplace=True)

    @replaces(Scheduler, "add_request")
    def add_request(before, scheduler, request):
        if request.lora_request.load_inplace:
            shutil.copy(f"{made[1].lora_path}/adapter_model.safetensors", made[0].lora_path)
        before(scheduler, request)

    def look(request, hit, table):
        if not request.lora_request.load_inplace:
            old.update(block.block_id for block in table)
            return
        if old & set(hit):
            fired()
        old.difference_update(block.block_id for block in table[len(hit) :])

    when_allocated(look)


@bug(
    "vllm-project/vllm-metal#716",
    "llama-eagle",
    "prefix_not_computed",
    "kv_write_lost",
    origin="vllm-metal",
    recorded=False,  # vLLM itself leaves its drafter out of some steps
)
def step_without_drafts_feeds_no_drafter(fired: Fired) -> None:
    """In a batch of a certain size no tokens are drafted, and the drafter returns before it has taken in what the target has computed. When
    it drafts again its own K and V of those tokens have never been written."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    skipped: list[int] = []

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, **kwargs):
        batch = kwargs["common_attn_metadata"].batch_size()
        if batch > 2:
            skipped.append(1)
            return kwargs["next_token_ids"].new_zeros((batch, kwargs["num_speculative_tokens"]))
        if skipped:
            fired()
        return before(proposer, **kwargs)


@bug("Luce-Org/lucebox#371", "llama-loads", "host_copy_overwritten", "load_of_other_prefix", origin="Lucebox")
def slot_taken_from_a_live_entry(fired: Fired) -> None:
    """Slots for what is kept on the host are handed out in turns, and the entry that a slot had is not struck off when it comes again. That
    entry names another prompt's K and V from then on, and a request with its tokens loads them."""
    import host_connector

    class InTurns(dict):
        """What is kept under (layer, key): a key has a slot, and a slot what was put there last."""

        def __init__(self):
            super().__init__()
            self.slots: dict = {}

        def __setitem__(self, place, rows):
            slot = self.slots.setdefault(place[1], len(self.slots) % 5)
            super().__setitem__((place[0], slot), (place[1], rows))

        def __getitem__(self, place):
            return super().__getitem__((place[0], self.slots[place[1]]))[1]

        def __contains__(self, place):
            return place[1] in self.slots

        def others(self, place):
            return super().__getitem__((place[0], self.slots[place[1]]))[0] != place[1]

    @replaces(host_connector.HostConnector, "__init__")
    def init(before, connector, *args, **kwargs):
        before(connector, *args, **kwargs)
        if hasattr(connector, "_store"):
            connector._store = InTurns()

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        name = connector._groups[0].layer_names[0]
        if any(connector._store.others((name, key)) for *_, key in job.blocks):
            fired()
        before(connector, job)
