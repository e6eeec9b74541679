"""A forty-sixth round of public bugs made anew, in LMDeploy: recorded before any rule was run on them."""

from importlib import import_module
from typing import Any

from bugs import Fired, bug, replaces

from planted.lmdeploy.round_38 import ENGINE, GRAPHS, PAGING, Steps, Written


class Embedded(Steps):
    """Which embedding each slot was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, Any] = {}  # slot -> embedding, and which row of it; None for a token's
        self.damaged = False  # whether the step reads a slot that was computed from another embedding

    def feed(self, agent: Any, inputs: Any, seqs: list[Any]) -> None:
        size, read = agent.cache_config.kernel_block_size, []
        lens = zip(inputs.history_lengths.tolist(), inputs.seq_length.tolist(), strict=True)
        for seq, table, (cached, new) in zip(seqs, inputs.block_offsets.tolist(), lens, strict=True):
            given: list[Any] = [None] * (cached + new)
            for one in seq.history_embeddings.embeddings:
                given[one.start : one.end] = [(one.embeddings.tobytes(), row) for row in range(one.end - one.start)]
            slots = [table[p // size] * size + p % size for p in range(cached + new)]
            read += zip(slots[:cached], given, strict=False)
            self.of.update(zip(slots[cached:], given[cached:], strict=True))
        self.damaged = any(self.of[slot] != mine for slot, mine in read)


@bug("tenstorrent/vllm-tt-plugin#122", "lmd-between", "future_map_overrun", origin="vLLM TT")
def tokens_that_are_kept_lie_in_a_prefills_scratch(fired: Fired) -> None:
    """The tokens that a decode step goes on from stay on the device, in memory that the prefill uses as scratch. A part of a long
    prompt that runs between two decode steps leaves zeros there: where the batch is still the same nobody sends the tokens again,
    and each request is fed token 0, at the right position."""
    step_inputs, kept = import_module("lmdeploy.pytorch.strategies.ar.step_inputs").ARStepInputs, []

    @replaces(step_inputs, "reindex")
    def reindex(before, held, delta):
        if kept and len(delta.indices) != len(held.model_inputs.seq_length):
            held.model_inputs.input_ids = kept.pop()
        before(held, delta)

    @replaces(step_inputs, "merge_prefill")
    def merge_prefill(before, held, *args):
        if kept:
            held.model_inputs.input_ids = kept.pop()
        before(held, *args)

    @replaces(import_module(f"{ENGINE}.model_agent.agent").BaseModelAgent, "_forward_impl")
    def _forward_impl(before, agent, inputs, **given):
        held = agent.step_inputs.model_inputs
        if inputs.is_chunk and not inputs.is_last_chunk and held is not None and not kept:
            kept.append(held.input_ids)
            held.input_ids = held.input_ids * 0
        if inputs.is_decoding and kept and (inputs.input_ids != kept.pop()).any():
            fired()
        return before(agent, inputs, **given)


@bug("GeeeekExplorer/nano-vllm#208", "lmd-follows", "hit_before_written", origin="nano-vLLM")
def blocks_are_cached_when_they_are_allocated(fired: Fired) -> None:
    """A prompt's blocks are given to it all at once, and are in the prefix cache from then on, though only its first part is
    computed. Who is let in before the other parts have run, and begins in the same way, hits blocks that nobody has written
    yet."""
    written = Written()

    for owner in (
        import_module(f"{PAGING}.block_manager.base_block_manager").BaseBlockManager,
        import_module(f"{PAGING}.block_trie.trie").BlockTrie,
    ):

        @replaces(owner, "allocate")
        def allocate(before, one, seq, *args):
            limit, seq.kv_token_limit = seq.kv_token_limit, None
            before(one, seq, *args)
            seq.kv_token_limit = limit

    @written.hook
    def before_forward(*_):
        if written.damaged:
            fired()


@bug(
    "InternLM/lmdeploy#4933",
    "lmd-embeds",
    "identity_not_in_key",
)
def embeddings_are_not_in_the_key(fired: Fired) -> None:
    """A request may have embeddings in the place of some of its tokens. The keys of the prefix cache are made of the tokens and
    of images, not of these: who has the same tokens and other embeddings goes on from KV that was computed from the first
    one's."""
    embedded = Embedded()
    messages = import_module("lmdeploy.pytorch.messages")

    @replaces(messages.SchedulerSequence, "get_prefix_cache_extra_identity")
    def get_prefix_cache_extra_identity(before, seq, start, end):
        return tuple(one for one in before(seq, start, end) if isinstance(one, messages.MultimodalSpan))

    @embedded.hook
    def before_forward(*_):
        if embedded.damaged:
            fired()


@bug(
    "vllm-project/vllm-ascend#16300", "lmd-replays", "attention_table_overwritten", "req_to_token", "slot_mapping",
    origin="vLLM Ascend",
    late="in the step before, what is read and written goes to the padding's slot, and is not looked at there",
)  # fmt: skip
def tables_of_a_graph_are_not_brought_up_to_date(fired: Fired) -> None:
    """What a graph has of its own is brought up to date before it is replayed, but not its block table, which is that of the step
    with which it was captured. Each later step that takes the graph stores and reads where the requests of that one did."""
    captured = {}

    @replaces(import_module(GRAPHS).CudaGraphMixin, "fill_buffers_cudagraph")
    def fill_buffers_cudagraph(before, model, graph_meta, **given):
        rows, size = given["input_ids"].shape[1], given["past_key_values"][0][0].shape[1]
        filled = before(model, graph_meta, **given)
        attention = filled["attn_metadata"]
        table, lens = attention.block_offsets, attention.kv_seqlens.tolist()
        kept = captured.setdefault(id(graph_meta), (graph_meta, table.clone()))[1]
        if any((kept != table)[row, : -(-lens[row] // size)].any() for row in range(rows)):
            fired()
        table.copy_(kept)
        return filled
