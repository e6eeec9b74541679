"""More public bugs made anew in vLLM 0.32 on the CPU, with other pages: recorded before any rule was looked at."""

import itertools
from typing import Any

from bugs import Fired, bug, replaces

from .marks import before_forward, when_adopted, when_allocated


@bug("tenstorrent/tt-metal#55630", "llama-page64", "slot_mapping", origin="tt-metal")
def chunk_gets_first_blocks(fired: Fired) -> None:
    """A later chunk of a prompt is given the request's first blocks to fill instead of its own. It overwrites what earlier
    chunks have left there, and its own blocks stay as they were."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        ends = starts[: num_reqs + 1].tolist()
        for row, (first, end) in enumerate(itertools.pairwise(ends)):
            offset = int(positions[first])
            if end - first > 4 and offset >= 32:
                fired()
                for at in range(first, end):
                    place = int(positions[at]) - offset
                    block = int(table.block_table.np[row, place // table.block_size])
                    table.slot_mapping.gpu[at] = block * table.block_size + place % table.block_size


# Its step is recorded as two forwards, since one of its requests reads what another writes; the reader comes second.
@bug("tenstorrent/tt-xla#5817", "llama-page64", "position_off", origin="tt-xla", reads=2)
def positions_from_first_row(fired: Fired) -> None:
    """The offset of a chunk is read from the batch's first row for every row. The tokens of the other requests get
    positions that begin where the first one stands."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        done = before(runner, output, *args, **kwargs)
        batch, at = runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            count = output.num_scheduled_tokens[name]
            off = int(batch.num_computed_tokens_cpu[0]) - int(batch.num_computed_tokens_cpu[row])
            if row and count > 1 and off:
                fired()
                runner.positions[at : at + count] += off
            at += count
        return done


@bug("waybarrios/vllm-mlx#385", "llama-page64", "attention_seq_len_wrong", origin="vllm-mlx")
def reads_past_trimmed_end(fired: Fired) -> None:
    """A request that joins a longer cached entry is cut to the common part in its count alone. Attention goes on looking at
    what stands behind that, which is the other request's."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        starts = common.query_start_loc
        lens = (starts[1:] - starts[:-1])[: len(common.seq_lens)]
        joined = (lens > 1) & (lens < common.seq_lens)
        if bool(joined.any()):
            fired()
            common = common.replace(seq_lens=common.seq_lens.where(~joined, common.seq_lens + 5))
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("vllm-project/vllm#7018", "llama-page64", "attention_table_overwritten")
def uncached_rows_are_zero(fired: Fired) -> None:
    """When some requests of a batch hit the prefix cache and some do not, the rows of those that do not stay zero in the
    table that attention gets. They read block 0."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        starts = common.query_start_loc
        lens = (starts[1:] - starts[:-1])[: len(common.seq_lens)]
        cold = lens == common.seq_lens
        if bool(cold.any()) and bool(((lens > 1) & ~cold).any()):
            fired()
            metadata.block_table = metadata.block_table.clone()
            metadata.block_table[: len(cold)][cold] = 0
        return metadata


@bug("vllm-project/vllm#56734", "llama-page64", "kv_changed")
def idle_step_writes_stale_row(fired: Fired) -> None:
    """A step without requests runs the drafter on rows that requests have left. It writes K and V into blocks that the
    prefix cache still has, and the next hit reads them."""
    from vllm.v1.core.block_pool import BlockPool

    left: list[int] = []
    stale: set[int] = set()

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):
        blocks = list(blocks)
        before(pool, blocks)
        left.extend(b.block_id for b in blocks if b.ref_cnt == 0 and b.block_hash is not None)

    def look(runner, output):
        if left and not stale and len(output.num_scheduled_tokens) > 1:
            stale.update(left[-4:])
            for cache in runner.kv_caches:
                for block in stale:
                    cache[block].fill_(0.25)

    before_forward(look)
    when_adopted(stale, fired)


@bug("llm-d/llm-d-router#1494", "llama-salts", "identity_not_in_key", origin="llm-d")
def salt_left_out(fired: Fired) -> None:
    """The salt that keeps tenants apart is not part of a block's key. A request joins blocks of another tenant with the same
    prompt."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.generate_block_hash_extra_keys = lambda request, start, end, mm: (None, mm)
    salts: dict[int, str] = {}

    def look(request, hit, table):
        if any(salts.get(b, request.cache_salt) != request.cache_salt for b in hit):
            fired()
        salts.update({block.block_id: request.cache_salt for block in table[len(hit) :]})

    when_allocated(look)


@bug("jjang-ai/vmlx#198", "llama-few", "page_given_twice", "eviction_of_locked_page", origin="vmlx")
def revived_while_listed_free(fired: Fired) -> None:
    """A cached block without users that is hit again gets a user and stays in the free list. When its turn comes it is given
    to somebody else as well."""
    from vllm.v1.core.block_pool import BlockPool

    taken: list[Any] = []

    @replaces(BlockPool, "touch")
    def touch(before, pool, blocks):
        blocks = list(blocks)
        idle = [b for b in blocks if b.ref_cnt == 0 and not b.is_null]
        before(pool, blocks)
        if not taken:
            taken.extend(idle[:1])

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, count):
        given = before(pool, count)
        if taken and taken[0].ref_cnt == 1 and given and taken[0] is not given[-1] and taken[-1] is not None:
            extra = given[-1]
            extra.ref_cnt -= 1
            pool.free_block_queue.append(extra)
            pool._maybe_evict_cached_block(taken[0])
            taken[0].ref_cnt += 1
            given[-1] = taken[0]
            taken.append(None)
            fired()
        return given


@bug("vllm-project/aibrix#2329", "llama-parts", "tokens_truncated_hash_kept", origin="AIBrix")
def only_last_block_in_key(fired: Fired) -> None:
    """The key of a list of blocks is its last block's and their number, and what came before is not in it. A request joins a
    block of its own tokens that was computed behind another prompt."""
    from vllm.v1.core import kv_cache_utils

    @replaces(kv_cache_utils, "hash_block_tokens")
    def hash_block_tokens(before, function, parent, tokens, extra=None):
        return before(function, None, tokens, extra)

    behind: dict[int, tuple] = {}

    def look(request, hit, table):
        ids = tuple(request.all_token_ids)
        if any(behind.get(block) != ids[: (place + 1) * 32] for place, block in enumerate(hit)):
            fired()
        for place in range(len(hit), len(table)):
            behind[table[place].block_id] = ids[: (place + 1) * 32]

    when_allocated(look)


@bug("ggml-org/llama.cpp#12160", "llama-parts", "tokens_truncated_hash_kept", "position_off", origin="llama.cpp")
def reused_at_another_place(fired: Fired) -> None:
    """A chunk of a cached prompt is reused where it comes again, at another position, and the shift of its cells is left out.
    Its K was rotated for the old place."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    chains: list[tuple[list[int], Any]] = []

    @replaces(KVCacheManager, "get_computed_blocks")
    def get_computed_blocks(before, manager, request):
        found = before(manager, request)
        ids = list(request.all_token_ids)
        for other, hashes in chains:
            if not found[1] and ids[:32] == other[32:64] and len(hashes) > 1:
                held = [manager.block_pool.get_cached_block(h, [0]) for h in hashes[1:2]]
                if all(held):
                    fired()
                    return manager.create_kv_cache_blocks(([one[0] for one in held],)), 32, 0
        chains.append((ids, list(request.block_hashes)))
        return found


@bug("RBLN-SW/vllm-rbln#676", "llama-preempt", "req_to_token", origin="vllm-rbln")
def freed_block_prepended(fired: Fired) -> None:
    """A block that was stashed for a request is not dropped when the request is preempted and its blocks are given back. When
    it comes back, the stale block is put before its new ones in its table."""
    from vllm.v1.worker.block_table import BlockTable

    gone: list[int] = []

    @replaces(BlockTable, "clear_row")
    def clear_row(before, table, row):
        if table.num_blocks_per_row[row] > 1 and not gone:
            gone.append(int(table.block_table.np[row, table.num_blocks_per_row[row] - 1]))
        before(table, row)

    done: list[int] = []

    def look(runner, output):
        table = runner.input_batch.block_table[0]
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            row = runner.input_batch.req_id_to_index[name]
            if gone and not done and gone[0] != int(table.block_table.np[row, 0]):
                done.append(1)
                count = int(table.num_blocks_per_row[row])
                table.block_table.np[row, 1 : count + 1] = table.block_table.np[row, :count].copy()
                table.block_table.np[row, 0] = gone[0]
                fired()

    before_forward(look)


@bug("vllm-project/vllm#9730", "llama-eagle", "chunk_tail_predicted_token", recorded=False)
def drafts_with_wrong_bonus_token(fired: Fired) -> None:
    """The drafter is given a token that it made itself in the place of the one that was sampled. The draft's K and V of that
    position are another token's."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    @replaces(SpecDecodeBaseProposer, "set_inputs_first_pass")
    def set_inputs_first_pass(before, proposer, *args, **kwargs):
        if "next_token_ids" in kwargs and len(kwargs["next_token_ids"]) > 1:
            fired()
            kwargs["next_token_ids"] = (kwargs["next_token_ids"] + 7) % 500
        return before(proposer, *args, **kwargs)
