"""A thirty-eighth round of public bugs made anew, the first in LMDeploy: recorded before any rule was run on them."""

import asyncio
from collections import deque
from importlib import import_module
from typing import Any

from bugs import Fired, bug, replaces

ENGINE = "lmdeploy.pytorch.engine"
PAGING = "lmdeploy.pytorch.paging"
GRAPHS = "lmdeploy.pytorch.models.utils.cudagraph"


class Steps:
    """The sequences of each step, from when it is scheduled until it runs. `hook` is called before each forward."""

    def __init__(self) -> None:
        self.made: deque[tuple[list[Any], bool]] = deque()
        self.noted = False  # what a patch noticed while the step was scheduled

    def hook(self, before_forward: Any) -> None:
        @replaces(import_module(f"{ENGINE}.inputs_maker").InputsMakerAsync, "_make_forward_inputs")
        def _make_forward_inputs(before, maker, *args, **given):
            made = before(maker, *args, **given)
            if made is not None:
                self.made.append((list(made["running"]), self.noted))
                self.noted = False
            return made

        @replaces(import_module(f"{ENGINE}.model_agent.agent").BaseModelAgent, "_forward_impl")
        def _forward_impl(before, agent, inputs, **given):
            seqs, noted = self.made.popleft()
            self.feed(agent, inputs, seqs)
            before_forward(agent, inputs, seqs, noted)
            return before(agent, inputs, **given)

    def feed(self, agent: Any, inputs: Any, seqs: list[Any]) -> None: ...


class Written(Steps):
    """What each slot holds by what was fed to the model: the tokens up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, tuple[int, ...]] = {}  # slot -> tokens up to its own
        self.fed: dict[int, list[int]] = {}  # sequence -> what it was fed, or hit
        self.damaged = False  # whether the step reads a slot that does not hold what its sequence has there

    def feed(self, agent: Any, inputs: Any, seqs: list[Any]) -> None:
        """All of a step is stored before any of it attends."""
        size, ids, read = agent.cache_config.kernel_block_size, inputs.input_ids[0].tolist(), []
        lens = zip(inputs.history_lengths.tolist(), inputs.seq_length.tolist(), strict=True)
        for seq, table, (cached, new) in zip(seqs, inputs.block_offsets.tolist(), lens, strict=True):
            known = self.fed.setdefault(seq.seq_id, [])
            del known[cached:]
            known += [*seq.all_ids[len(known) : cached].tolist(), *ids[:new]]
            del ids[:new]
            slots = [table[p // size] * size + p % size for p in range(cached + new)]
            read.append((slots[:cached], known))
            for position in range(cached, cached + new):
                self.of[slots[position]] = tuple(known[: position + 1])
        self.damaged = any(
            self.of.get(slot) != tuple(known[: position + 1])
            for slots, known in read
            for position, slot in enumerate(slots)
        )


@bug("InternLM/lmdeploy#3589", "lmd-plain", "prefix_not_computed")
def step_is_kept_when_blocks_are_taken(fired: Fired) -> None:
    """A sequence whose blocks are taken from it keeps its step. When it is let in again it gets other blocks, and goes on behind what it had computed in those that are
    gone."""
    written = Written()

    @replaces(import_module(f"{PAGING}.seq_states.states").StateBase, "free")
    def free(before, state):
        step = state.seq.num_history_ids
        before(state)
        state.seq.set_step(step)

    @written.hook
    def before_forward(*_):
        if written.damaged:
            fired()


@bug("InternLM/lmdeploy#3887", "lmd-graphs", "position_off")
def positions_begin_where_the_one_before_is_as_long(fired: Fired) -> None:
    """Where a prompt's positions begin among those of a step is taken from the length of the one before it, not from the lengths of all before it. From the third on they are
    written over one another, and the last ones get none."""
    import torch

    @replaces(import_module("lmdeploy.pytorch.model_inputs").StepContext, "get_mask_and_position_ids")
    def get_mask_and_position_ids(before, inputs):
        mask, positions = before(inputs)
        if mask is None or inputs.max_q_seqlen == 1:
            return mask, positions
        indices = mask.cumsum(-1) - 1
        mine = indices + inputs.history_lengths[:, None]
        indices[1:] += inputs.seq_length[:-1, None]
        made = torch.zeros_like(positions[0])
        made[indices.flatten()] = mine.flatten()
        if (made != positions[0]).any():
            fired()
        return mask, made[None]


@bug("InternLM/lmdeploy#4157", "lmd-equal", "pad_rows_keep_last_blocks")
def first_block_is_given_out_as_well(fired: Fired) -> None:
    """What a graph's rows of padding write goes to the first block, and the first block is given out like any other. Each step that is filled up overwrites the beginning of
    the sequence that has it."""

    @replaces(import_module(f"{ENGINE}.config_builder").ConfigBuilder, "build_cache_config")
    def build_cache_config(before, config):
        made = before(config)
        made.num_reserved_gpu_blocks = 0
        return made

    @replaces(import_module(GRAPHS).CudaGraphMixin, "fill_buffers_cudagraph")
    def fill_buffers_cudagraph(before, model, graph_meta, **given):
        rows, size = given["input_ids"].shape[1], given["past_key_values"][0][0].shape[1]
        filled = before(model, graph_meta, **given)
        attention = filled["attn_metadata"]
        lens = attention.kv_seqlens.tolist()
        read = [attention.block_offsets[row, : -(-lens[row] // size)] for row in range(rows)]
        if rows < len(lens) and any((table == 0).any() for table in read):
            fired()
        return filled


@bug("InternLM/lmdeploy#4309", "lmd-aborts", "prefix_not_computed", "scheduled_after_retraction", "page_leaked")
def parts_go_on_when_the_prompt_is_stopped(fired: Fired) -> None:
    """Nobody tells what computes a long prompt in parts that it has been stopped. The prompt's blocks are gone and its step is 0, but the next part is counted on from where it
    was: what lies between is never computed, and the blocks that it is given anew never come back."""
    written = Written()

    @replaces(import_module(f"{ENGINE}.inputs_maker").LongContextChunker, "check_enable")
    def check_enable(before, chunker): ...

    @written.hook
    def before_forward(*_):
        if written.damaged:
            fired()


@bug(
    "InternLM/lmdeploy#4792", "lmd-chunks", "future_map_overrun",
    late="what is overwritten is what the scheduler is asked for, too, until it has its own tokens again",
)  # fmt: skip
def inputs_are_brought_over_those_of_a_step_that_runs(fired: Fired) -> None:
    """The inputs of a step are brought to the device on a stream of their own, and nothing says that another one reads them. When the step has been launched their memory is free, and the
    next step's are brought there before it has been read."""
    agent, memory, brought = import_module(f"{ENGINE}.model_agent.agent"), {}, {}

    @replaces(agent, "_try_to_cuda")
    def _try_to_cuda(before, value, **given):
        made = before(value, **given)
        if hasattr(made, "history_lengths"):
            place = memory.setdefault(made.input_ids.shape, made.input_ids)
            place.copy_(made.input_ids)
            brought[id(made)] = made.input_ids.clone()
            made.input_ids = place
        return made

    @replaces(import_module(f"{ENGINE}.model_agent.inputs_maker").DefaultForwardInputsMaker, "get")
    async def get(before, maker):
        made = await before(maker)
        for _ in range(8):  # it is launched, and runs when the next one has been brought
            if not maker._in_que.empty():
                break
            await asyncio.sleep(0)
        return made

    @replaces(agent.BaseModelAgent, "_forward_impl")
    def _forward_impl(before, model, inputs, **given):
        mine = brought.pop(id(inputs), None)
        if mine is not None and (mine != inputs.input_ids).any():
            fired()
        return before(model, inputs, **given)


@bug("vllm-project/vllm#3347", "lmd-equal", "free_too_early", "double_free", "page_given_twice", origin="vLLM")
def block_that_was_let_go_stays_in_the_table(fired: Fired) -> None:
    """A block that a sequence has no need of any more, since another has the same, is let go and stays in its table. It is read on, though it is given to others meanwhile, and when the sequence is over it is
    let go once more."""
    written = Written()

    @replaces(import_module(f"{PAGING}.block_trie.trie").BlockTrie, "_extend_trie_path")
    def _extend_trie_path(before, trie, seq, node, num_complete_blocks):
        mine = seq.logical_blocks.get_real_blocks().copy()
        before(trie, seq, node, num_complete_blocks)
        seq.logical_blocks[:] = mine

    @written.hook
    def before_forward(*_):
        if written.damaged:
            fired()


@bug(
    "vllm-project/vllm#56381", "lmd-split", "req_to_token", "commit_beyond_allocation", "slot_mapping", origin="vLLM",
    late="a request's token that goes to a slot of padding is found when it is read",
)  # fmt: skip
def table_names_the_managers_blocks(fired: Fired) -> None:
    """The kernels' blocks are smaller than those that are given out, and the table that they get names the latter, as it is: their numbers are those of others' blocks, and there are too
    few of them."""
    steps = Steps()

    @replaces(import_module(f"{ENGINE}.inputs_maker").InputsMakerAsync, "_map_to_kernel_block_offsets")
    def _map_to_kernel_block_offsets(before, maker, block_offsets):
        made = before(maker, block_offsets)
        count = block_offsets.shape[1]
        made[:, :count], made[:, count:] = block_offsets, 0
        return made

    @steps.hook
    def before_forward(*_):
        fired()


@bug("inference-sim/inference-sim#1065", "lmd-full", "page_leaked", origin="inference-sim")
def blocks_are_forgotten_when_there_is_no_other(fired: Fired) -> None:
    """Where a sequence that goes on cannot be given another block, what it is given is undone by forgetting what it has: its blocks have nobody any more, and are not free
    either."""
    steps = Steps()

    @replaces(import_module(f"{PAGING}.seq_states.states").ReadyState, "evict")
    def evict(before, state):
        before(state)
        state.seq.logical_blocks.reset()
        state.free()
        steps.noted = True

    @steps.hook
    def before_forward(agent, inputs, seqs, noted):
        if noted:
            fired()


@bug("InfiniTensor/InfiniLM#540", "lmd-split", "attention_seq_len_wrong", "slot_mapping", origin="InfiniLM")
def lengths_are_those_of_the_capture(fired: Fired) -> None:
    """The lengths that a graph's kernels are given are read on the host when it is captured, and stay as they were. Each later step stores where the captured one did, and attends to as
    many tokens."""
    captured = {}

    @replaces(import_module(GRAPHS).CudaGraphMixin, "fill_buffers_cudagraph")
    def fill_buffers_cudagraph(before, model, graph_meta, **given):
        rows = given["input_ids"].shape[1]
        filled = before(model, graph_meta, **given)
        lens = filled["attn_metadata"].kv_seqlens
        kept = captured.setdefault(id(graph_meta), (graph_meta, lens.clone()))[1]
        if (kept != lens)[:rows].any():
            fired()
        lens.copy_(kept)
        return filled


@bug(
    "sgl-project/mini-sglang#46", "lmd-evicts", "eviction_of_locked_page", origin="mini-sglang",
    late="the step is recorded as two forwards, of which the second reads",
)  # fmt: skip
def root_is_locked_in_place_of_what_was_hit(fired: Fired) -> None:
    """Looking for a prefix goes up to the root when it has been found, and it is the root that is kept as what was hit. Who reads the prefix counts as a reader of the root, and the prefix is
    evicted."""
    written, hits = Written(), {}

    @replaces(import_module(f"{PAGING}.block_trie.trie").BlockTrie, "_match_block_prefix")
    def _match_block_prefix(before, trie, seq):
        count = len(seq.logical_blocks)
        before(trie, seq)
        trie.allocator.add_ref_count(seq.logical_blocks[count:].copy(), -1)
        hits[seq.seq_id] = len(seq.logical_blocks)

    @replaces(import_module(f"{PAGING}.block_manager.default_block_manager").DefaultBlockManager, "free")
    def free(before, manager, msg):
        manager.allocator.add_ref_count(msg.logical_blocks[: hits.pop(msg.seq_id, 0)].copy(), 1)
        before(manager, msg)

    @written.hook
    def before_forward(*_):
        if written.damaged:
            fired()


@bug("sgl-project/mini-sglang#113", "lmd-graphs", "next_token_swap", origin="mini-sglang")
def ranks_have_their_requests_in_other_orders(fired: Fired) -> None:
    """The requests of a decode step are in the order in which a set has them, which is another one on each rank. The sampled tokens come from the first rank, in its order, and are fed to the
    requests in the order of this one."""
    wrong = []

    @replaces(import_module("lmdeploy.pytorch.strategies.ar.step_inputs").ARStepInputs, "step_decode")
    def step_decode(before, inputs, model_inputs, *args):
        *first, tokens, metas, outputs = args
        theirs = tokens.roll(1) if len(tokens) > 3 else tokens
        wrong.append((theirs != tokens).any())
        return before(inputs, model_inputs, *first, theirs, metas, outputs)

    @replaces(import_module(f"{ENGINE}.model_agent.agent").BaseModelAgent, "_forward_impl")
    def _forward_impl(before, agent, inputs, **given):
        if inputs.is_decoding and wrong and wrong[-1]:
            fired()
        return before(agent, inputs, **given)


@bug(
    "RBLN-SW/vllm-rbln#662", "lmd-plain", "req_to_token", "commit_beyond_allocation", origin="vLLM RBLN",
    late="a request's token that goes to a slot of padding is found when it is read",
)  # fmt: skip
def block_that_was_granted_is_never_told(fired: Fired) -> None:
    """What a decoding request is granted in a step that is given up for a prompt is not told to the runner, and in the next one the scheduler takes it to be known. The runner's table has a 0 in its
    place."""
    told, lost, steps = {}, set(), Steps()
    maker_class = import_module(f"{ENGINE}.inputs_maker").InputsMakerAsync

    @replaces(maker_class, "create_model_inputs")
    def create_model_inputs(before, maker, messages, is_prefill):
        told.update((seq.seq_id, seq.num_blocks) for seq in messages)
        lost.difference_update([one for one in lost if one[0] in {seq.seq_id for seq in messages}])
        return before(maker, messages, is_prefill)

    @replaces(maker_class, "create_model_inputs_delta")
    def create_model_inputs_delta(before, maker):
        made = before(maker)
        delta, seqs, _ = made
        for row, seq in enumerate(seqs):
            if maker._last_forward_kind != "decode":
                lost.update((seq.seq_id, block) for block in range(told[seq.seq_id], seq.num_blocks))
            told[seq.seq_id] = seq.num_blocks
            for block in (block for number, block in lost if number == seq.seq_id):
                delta.block_offsets[row, block] = 0
        return made

    @steps.hook
    def before_forward(agent, inputs, seqs, _):
        ends = (inputs.history_lengths + inputs.seq_length).tolist() if inputs.is_decoding else []
        size = agent.cache_config.block_size
        if any((seq.seq_id, b) in lost for seq, end in zip(seqs, ends, strict=False) for b in range(-(-end // size))):
            fired()
