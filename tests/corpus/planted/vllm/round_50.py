"""A fiftieth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import copy

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, states_of, when_allocated


@bug(
    "vllm-project/vllm-ascend#15510",
    "delta-idles",
    "kv_changed",
    "state_restored_for_other_prefix",
    origin="vLLM Ascend",
)
def idle_rank_steps_the_state_that_its_last_request_has_left(fired: Fired) -> None:
    """A rank that has no requests computes one token that is made up, to keep pace with the others. Layers with attention write
    nothing for it, but those with a recurrent state take it for a token of whoever had the first row last, and move the
    state on in the block that the row still names. The prefix cache has that block, and the next hit goes on from it."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    runners: list = []
    moved: set[int] = set()

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, *args, **kwargs):
        new = before(pool, *args, **kwargs)
        moved.difference_update(block.block_id for block in new)
        return new

    @replaces(Scheduler, "update_from_output")
    def update_from_output(before, scheduler, *args, **kwargs):
        made = before(scheduler, *args, **kwargs)
        if scheduler.running or scheduler.waiting:
            return made
        group, layers = states_of(runners[0])
        block = int(runners[0].input_batch.block_table[group].block_table.np[0, 0])  # of the first token
        if block:
            drawn = torch.Generator().manual_seed(block)
            for name in layers:
                window, state = runners[0].compilation_config.static_forward_context[name].kv_cache
                token = torch.randn(window[block].shape, generator=drawn).to(window.dtype)
                ahead = 1 if window.shape[1] < window.shape[2] else 2  # the side along which tokens lie
                moved_on = torch.roll(window[block], -1, ahead - 1)
                moved_on.narrow(ahead - 1, -1, 1).copy_(token.narrow(ahead - 1, -1, 1) * window[block].std())
                window[block] = moved_on
                new = torch.randn(state[block].shape, generator=drawn) * state[block].float().std()
                state[block] = (state[block].float() * 0.8 + new * 0.2).to(state.dtype)
            moved.add(block)
        return made

    def look(runner, output):
        runners[:] = [runner]
        group, _ = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        for new in output.scheduled_new_reqs:
            if new.num_computed_tokens and new.block_ids[group][(new.num_computed_tokens - 1) // size] in moved:
                fired()

    before_forward(look)


@bug("NVIDIA/TensorRT-LLM#18259", "llama-eagle-mixed", "attention_table_overwritten", origin="TensorRT-LLM")
def drafters_first_step_has_lengths_and_tables_in_different_orders(fired: Fired) -> None:
    """A step has prompts and decodes. For the drafter's first pass the block tables are put down with the two kinds of rows
    the other way around, while lengths, tokens and the places that are written stay in the order of the batch. Each row
    attends to as many tokens as are its own, in blocks of another row."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    order: list[int] = []

    def look(runner, output):
        batch = runner.input_batch
        rows = range(len(batch.req_ids))
        prompts = [row for row in rows if batch.num_computed_tokens_cpu[row] < batch.num_prompt_tokens[row]]
        order[:] = [*prompts, *(row for row in rows if row not in prompts)]

    before_forward(look)

    @replaces(SpecDecodeBaseProposer, "build_per_group_and_layer_attn_metadata")
    def build(before, proposer, common, draft_index=0):
        count = len(order)
        if draft_index == 0 and order != list(range(count)) and common.num_reqs == count:
            common = copy.copy(common)
            common.block_table_tensor = common.block_table_tensor.clone()
            common.block_table_tensor[:count] = common.block_table_tensor[order]
            fired()
        return before(proposer, common, draft_index)


@bug("llm-d/llm-d-kv-cache#658", "qwen-loads-names", "stored_wrong", origin="llm-d")
def files_of_two_blocks_take_their_names_from_a_list_by_block(fired: Fired) -> None:
    """A file holds two blocks of a prompt. The scheduler was told of one: it hands over a name for each block, and the worker
    takes one for each file, so that a block's name stands for blocks twice as far on. Who loads a prompt from its first
    block on takes the names in the same way and has what is right; who goes on behind blocks that are there does not."""
    from host_connector import HostConnector

    handed: set[tuple] = set()  # names, for each request
    right: dict[tuple, torch.Tensor] = {}
    second: dict[tuple, torch.Tensor] = {}

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        had = set(connector._known)
        meta, lists = before(connector, output), {}
        meta.stores = [job for job in meta.stores if (job.name, job.blocks[0][2]) not in handed]
        for job in meta.stores:
            handed.add((job.name, job.blocks[0][2]))
            lists.setdefault(job.name, []).append(job.blocks[0][2])
        connector._known = had.union(*(names[: -(-len(names) // 2)] for names in lists.values()))
        return meta

    @replaces(HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        lists: dict[str, list[tuple]] = {}
        for job in connector._get_connector_metadata().stores:
            lists.setdefault(job.name, []).extend(job.blocks)
        for blocks in lists.values():
            for place, (group, block, key) in enumerate(blocks):
                for name, rows in connector._blocks_of(group, block):
                    right[name, key] = rows.clone()
                    file = name, blocks[place // 2][2]
                    (second if place % 2 else connector._store)[file] = rows.clone()

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        for place, (group, block, key) in enumerate(job.blocks):
            for name, rows in connector._blocks_of(group, block):
                file = name, job.blocks[place // 2][2]
                kept = (second if place % 2 else connector._store).get(file)
                if kept is not None:
                    rows.copy_(kept)
                if kept is None or not torch.equal(kept, right[name, key]):
                    fired()


WINDOW = 40  # of the model


def _keys_and_values(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a block's K and V, each by head, token and dimension."""
    heads, size, width = rows.shape
    flat = rows.view(heads, 2 * size, width // 2)
    return flat[:, :size].view(heads, width // 2, size).transpose(1, 2), flat[:, size:]


@bug("ml-explore/mlx-lm#1486", "sliding-guesses", "kv_changed", origin="mlx-lm")
def what_rejected_drafts_have_pushed_out_of_a_window_does_not_come_back(fired: Fired) -> None:
    """A layer with a window keeps as many tokens as that has, and each new one takes the place of the oldest. When drafts are
    rejected only the count of tokens is turned back: they stay where they are, and the old tokens that they took
    the place of are in the window again."""
    ends: dict[str, int] = {}  # behind what the last step wrote

    def look(runner, output):
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        size, changed = table.block_size, False
        for row, name in enumerate(batch.req_ids):
            computed, held = int(batch.num_computed_tokens_cpu[row]), table.block_table.np[row]
            for place in range(computed, ends.get(name, computed)):
                old = place - WINDOW
                if old <= computed - WINDOW or old < 0 or not held[old // size] or not held[place // size]:
                    continue
                for cache in runner.kv_caches:
                    parts = (_keys_and_values(cache[held[one // size]]) for one in (old, place))
                    for mine, draft in zip(*parts, strict=True):
                        mine[:, old % size] = draft[:, place % size]
                changed = changed or name in output.num_scheduled_tokens
            ends[name] = computed + output.num_scheduled_tokens.get(name, 0)
        if changed:
            fired()

    before_forward(look)


@bug("nod-ai/amd-shark-ai#873", "qwen-histories", "attention_seq_len_wrong", origin="shark-ai")
def length_of_a_decode_is_its_position_and_all_that_came_before(fired: Fired) -> None:
    """A decode's length is worked out as the position at which it begins and the number of tokens that the request holds. That
    was one token, and is now all that it has had so far. What hides the unused part of the request's last page hides
    nothing any more: attention takes in what others have left there."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    decodes: list[tuple[int, int]] = []  # rows, and how many tokens their pages hold

    def look(runner, output):
        batch = runner.input_batch
        table = batch.block_table[0]
        decodes[:] = [
            (row, int(table.num_blocks_per_row[row]) * table.block_size)
            for row in range(len(batch.req_ids))
            if batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]
        ]

    before_forward(look)

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        lengths = common.seq_lens.clone()
        for row, most in decodes:
            lengths[row] = min(2 * int(lengths[row]) - 1, most)
        if not torch.equal(lengths, common.seq_lens):
            common = common.replace(seq_lens=lengths)
            fired()
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("PrimeIntellect-ai/prime-rl#1650", "recurrent-refits", "cache_kept_over_new_weights", origin="prime-rl")
def cache_that_was_off_by_itself_is_on_and_nobody_empties_it(fired: Fired) -> None:
    """A trainer puts new weights in the engine after each of its steps. As long as it asked for the probabilities of prompts the
    prefix cache was off, and nothing empties it when weights come; since it does not ask any more the cache is on.
    Later requests go on behind what the weights of a step or two ago have computed."""
    from vllm.v1.core.sched.scheduler import Scheduler

    weights = [0]
    made: dict[int, int] = {}  # by block: with which weights

    @replaces(Scheduler, "reset_prefix_cache")
    def reset_prefix_cache(before, scheduler, *args, **kwargs):
        weights[0] += 1
        return True

    def look(request, hit, table):
        if any(made.get(block, weights[0]) != weights[0] for block in hit):
            fired()
        made.update({block.block_id: weights[0] for block in table[len(hit) :]})

    when_allocated(look)
