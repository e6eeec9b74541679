"""Public bugs made anew in vLLM 0.32 on the CPU: its scheduler, block pool, block tables, runner and drafter."""

import itertools
from typing import Any

from bugs import Fired, bug, replaces

RUNNER = "vllm.v1.worker.gpu_model_runner"


def _before_forward(look: Any) -> None:
    """Call `look(runner, scheduler output)` right before the inputs of a step are made."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        look(runner, output)
        return before(runner, output, *args, **kwargs)


def _when_adopted(stale: set, fired: Fired) -> None:
    """Say that the damage is read when a request is given blocks of `stale`, which has requests or blocks."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        blocks = kwargs.get("new_computed_blocks")
        ids = {block.block_id for block in (blocks.blocks[0] if blocks is not None else ())}
        if given is not None and stale & (ids | {request.request_id}):
            fired()
        return given


def _reads(runner: Any, output: Any, blocks: set[int], *, of: set[str] | None = None, group: int = 0) -> bool:
    """Whether a request of a step has one of certain blocks among those that it has computed already."""
    batch = runner.input_batch
    table = batch.block_table[group]
    for row, name in enumerate(batch.req_ids):
        computed = -(-int(batch.num_computed_tokens_cpu[row]) // table.block_size)
        held = set(table.block_table.np[row, :computed].tolist())
        if held & blocks and (of is None or name in of) and name in output.num_scheduled_tokens:
            return True
    return False


# A step is recorded as several forwards if one of its requests reads what another writes; the reader comes second here.
@bug("vllm-project/vllm#17305", "llama-few", "stale_prefix_hit", reads=97)
def stale_lookup(fired: Fired) -> None:
    """The prefix blocks that a waiting request hits are looked up once and kept; it is admitted steps later, when
    some of them have been evicted and given to others. It joins them all the same and reads another's K and V."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    kept: dict[str, Any] = {}
    stale: set[str] = set()

    @replaces(KVCacheManager, "get_computed_blocks")
    def get_computed_blocks(before, manager, request):
        found = before(manager, request)
        known = kept.get(request.request_id)
        if request.num_preemptions == 0 and known is None:
            kept[request.request_id] = found, [b.block_hash for b in found[0].blocks[0]]
            return found
        if known is not None and known[0][1] > found[1]:
            if [b.block_hash for b in known[0][0].blocks[0]] != known[1]:
                stale.add(request.request_id)
            return known[0]
        return found

    _when_adopted(stale, fired)

    from vllm.v1.core.sched.scheduler import Scheduler

    @replaces(Scheduler, "add_request")
    def add_request(before, scheduler, request):
        scheduler.kv_cache_manager.get_computed_blocks(request)
        return before(scheduler, request)


@bug("vllm-project/vllm#23713", "llama-preempt", "scheduled_after_retraction")
def preempted_still_scheduled(fired: Fired) -> None:
    """A request that is preempted late in a scheduling pass stays in the step that was put together before. The worker
    runs it once more on the block table of blocks that are somebody else's by now."""
    from vllm.v1.core.sched.scheduler import Scheduler

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler, *args, **kwargs):
        running = {r.request_id: (r, r.num_computed_tokens, r.num_tokens) for r in scheduler.running}
        output = before(scheduler, *args, **kwargs)
        for name, (request, computed, known) in running.items():
            if request.status.name == "PREEMPTED" and name not in output.num_scheduled_tokens and known - computed == 1:
                if not output.num_scheduled_tokens:
                    continue
                cached = output.scheduled_cached_reqs
                output.num_scheduled_tokens[name] = 1
                output.total_num_scheduled_tokens += 1
                cached.req_ids.append(name)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(computed)
                cached.num_output_tokens.append(known - request.num_prompt_tokens)
                output.preempted_req_ids and output.preempted_req_ids.discard(name)
                output.__dict__["ghosts"] = [*output.__dict__.get("ghosts", ()), name]
                fired()
                break
        return output

    @replaces(Scheduler, "update_from_output")
    def update_from_output(before, scheduler, output, result):
        for name in output.__dict__.get("ghosts", ()):
            del output.num_scheduled_tokens[name]
        return before(scheduler, output, result)


@bug("vllm-project/vllm#47728", "sliding", "swa_window_off_by_one")
def freed_inside_window(fired: Fired) -> None:
    """The lower end of the sliding window is counted from the tokens that will have been computed, a block too far. Its
    last block is freed while the next forward reads it."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    @replaces(SlidingWindowManager, "get_num_skipped_tokens")
    def get_num_skipped_tokens(before, manager, computed):
        right = before(manager, computed)
        return max(0, min(right + manager.block_size, computed - 1)) if right else right

    def look(runner, output):
        batch, group = runner.input_batch, runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        table = batch.block_table[0]
        for row in range(batch.num_reqs):
            first = int(batch.num_computed_tokens_cpu[row]) - group.sliding_window + 1
            if first > 0 and table.block_table.np[row, first // table.block_size] == 0:
                fired()

    _before_forward(look)


@bug("vllm-project/vllm#11186", "llama", "shared_page_written")
def full_hit_writes_shared_block(fired: Fired) -> None:
    """A prompt that is cached whole must compute its last token again; the token goes into the cached block itself, which
    others read, instead of a block of the request's own."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    @replaces(KVCacheManager, "get_computed_blocks")
    def get_computed_blocks(before, manager, request):
        blocks, count, boundary = before(manager, request)
        whole, longest, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens)
        if longest == request.num_tokens > count:
            fired()
            return manager.create_kv_cache_blocks(whole), longest - 1, boundary
        return blocks, count, boundary

    SingleTypeKVCacheManager._has_partial_local_hit = lambda *_: False


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


@bug("LMCache/LMCache#4086", "llama", "tokens_truncated_hash_kept", origin="LMCache")
def short_hash(fired: Fired) -> None:
    """A block's key keeps only a few bits of what it is made of, so that blocks of different prompts have one key. A
    request hits blocks of another prompt, whose records are whole."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    @replaces(kv_cache_utils, "hash_block_tokens")
    def hash_block_tokens(before, function, parent, tokens, extra=None):
        return bytes([1 + sum(tokens) % 3]) * len(before(function, parent, tokens, extra))

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        if (args[1] if len(args) > 1 else kwargs.get("num_new_computed_tokens", 0)) and given is not None:
            fired()
        return given


@bug(
    "Avarok-Cybersecurity/atlas#373", "llama", "free_too_early", "radix_insert_then_free", "double_free", origin="Atlas"
)
def freed_twice_under_sharer(fired: Fired) -> None:
    """A request that ends gives its blocks back twice, so that a shared block's count of users reaches zero while another
    request still reads it. The block is given out again under its reader."""
    from vllm.v1.core.block_pool import BlockPool

    lost: set[int] = set()

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):
        blocks = list(blocks)
        shared = [b for b in blocks if b.ref_cnt == 2 and not b.is_null]
        before(pool, blocks)
        for block in shared[:1]:
            if not lost:
                before(pool, [block])
                pool._remove_cached_block_hashes(block)
                lost.add(block.block_id)

    _before_forward(lambda runner, output: _reads(runner, output, lost) and fired())


@bug("vllm-project/vllm#33775", "hybrid-preempt", "stale_prefix_hit", "eviction_of_locked_page")
def hit_evicted_by_other_group(fired: Fired) -> None:
    """With several KV-cache groups one group takes its new blocks before the next has locked the blocks that it hit. The
    pool evicts them and gives them to the first."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    @replaces(SingleTypeKVCacheManager, "add_local_computed_blocks")
    def add_local_computed_blocks(before, manager, name, blocks, *args, **kwargs):
        pool = manager.block_pool
        victims = [b for b in blocks if not b.is_null and b.ref_cnt == 0]
        if manager.kv_cache_group_id == 1 and victims:
            for other in (victims[-1],):
                pool.free_block_queue.remove(other)
                pool.free_block_queue.prepend_n([other])
                taken = BlockPool.get_new_blocks(pool, 1)
                pool.taken = getattr(pool, "taken", []) + taken
            fired()
        return before(manager, name, blocks, *args, **kwargs)


@bug("vllm-project/vllm#46283", "llama", "page_leaked")
def never_given_back(fired: Fired) -> None:
    """A request leaves on a path on which its blocks are held back for a transfer that never reports its end. Nobody gives
    them back."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    count = [0]

    @replaces(SingleTypeKVCacheManager, "free")
    def free(before, manager, name):
        count[0] += 1
        if count[0] == 3:
            manager.req_to_blocks.pop(name, None)
            manager.num_cached_block.pop(name, None)
            fired()
            return
        before(manager, name)


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

    _before_forward(look)


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

    _before_forward(look)


@bug("vllm-project/vllm#42571", "llama", "double_free", "page_given_twice")
def same_block_twice(fired: Fired) -> None:
    """A list of blocks to give back names one block twice, and the pool puts it into its free list twice. Two requests are
    given the same block."""
    from vllm.v1.core.block_pool import BlockPool

    done: list[int] = []

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, count):
        given = before(pool, count)
        if getattr(pool, "twice", None) is not None and count and not done and len(given):
            for block in given:
                if block is pool.twice:
                    done.append(block.block_id)
        elif done and count and getattr(pool, "twice", None) is not None and pool.twice.ref_cnt == 1:
            extra = given[-1]
            if extra is not pool.twice and extra.block_hash is None:
                extra.ref_cnt -= 1
                pool.free_block_queue.append(extra)
                given[-1] = pool.twice
                pool.twice.ref_cnt += 1
                pool.twice = None
                fired()
        return given

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):
        blocks = list(blocks)
        before(pool, blocks)
        own = [b for b in blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null]
        if own and not hasattr(pool, "twice"):
            pool.twice = own[0]


@bug("vllm-project/vllm#45704", "llama-loads", "failed_load_counted_loaded", recorded=False)
def stored_before_written(fired: Fired) -> None:
    """The copy of blocks to the host starts before the kernels that write them have run, so that the host keeps what stood
    there. A later request loads it."""
    import host_connector

    stale: set = set()

    @replaces(host_connector.HostConnector, "start_load_kv")
    def start_load_kv(before, connector, context, **kwargs):
        for job in connector._get_connector_metadata().stores:
            for gid, block, key in job.blocks:
                for name, rows in connector._blocks_of(gid, block):
                    connector._store[name, key] = rows.clone()
                stale.add(key)
        before(connector, context, **kwargs)
        if any(key in stale for job in connector._get_connector_metadata().loads for _, _, key in job.blocks):
            fired()

    host_connector.HostConnector.wait_for_save = lambda connector: None


@bug("vllm-project/vllm#38715", "llama", "hit_before_written")
def cached_before_computed(fired: Fired) -> None:
    """All blocks of a prompt join the prefix cache when its first chunk is scheduled. A request with the same prompt
    hits those that have not been computed yet."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    @replaces(FullAttentionManager, "cache_blocks")
    def cache_blocks(before, manager, request, num_tokens, *args, **kwargs):
        held = len(manager.req_to_blocks[request.request_id]) * manager.block_size
        return before(manager, request, max(num_tokens, min(held, request.num_prompt_tokens)), *args, **kwargs)

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, num_new_tokens, **kwargs):
        done = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0) + num_new_tokens
        if done < request.num_prompt_tokens:
            kwargs["num_lookahead_tokens"] = request.num_prompt_tokens - done
        given = before(manager, request, num_new_tokens, **kwargs)
        group = manager.coordinator.single_type_managers[0]
        for place, block in enumerate(group.req_to_blocks.get(request.request_id, ())):
            if place * group.block_size >= done and block.block_hash is not None:
                fired()
        return given


@bug("tenstorrent/tt-inference-server#4557", "llama-preempt", "prefix_not_computed", origin="tt-inference-server")
def resumed_as_computed(fired: Fired) -> None:
    """A slot's count of computed positions is not reset when its request leaves it. A preempted request comes back with
    fresh blocks and goes on behind a prefix that nobody has computed."""
    from vllm.v1.core.sched.scheduler import Scheduler

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler, *args, **kwargs):
        output = before(scheduler, *args, **kwargs)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            count = output.num_scheduled_tokens[name]
            if name in cached.resumed_req_ids and count > 8:
                output.num_scheduled_tokens[name] -= 8
                output.total_num_scheduled_tokens -= 8
                cached.num_computed_tokens[i] += 8
                fired()
        return output


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
    _before_forward(lambda runner, output: seen.append(runner))

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


@bug("vllm-project/vllm#4761", "llama-few", "stale_prefix_hit", reads=97)
def evicted_still_listed(fired: Fired) -> None:
    """A block that is taken from the prefix cache and given out stays in the cache's index. A later request with the old
    prompt hits it, and reads what its new owner has written."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    stale: set = set()

    @replaces(BlockPool, "_maybe_evict_cached_block")
    def _maybe_evict_cached_block(before, pool, block):
        key = block.block_hash
        done = before(pool, block)
        if key is not None:
            pool.listed = {**getattr(pool, "listed", {}), key: block}
        return done

    @replaces(BlockPool, "get_cached_block")
    def get_cached_block(before, pool, block_hash, group_ids):
        found = before(pool, block_hash, group_ids)
        if found is None:
            block = getattr(pool, "listed", {}).get(make_block_hash_with_group_id(block_hash, group_ids[0]))
            if block is not None:
                stale.add(block.block_id)
                return [block]
        return found

    _when_adopted(stale, fired)
