"""Public bugs made anew in vLLM 0.32 on the CPU: its scheduler, block pool and prefix cache."""

from typing import Any

from bugs import Fired, bug, replaces

from .marks import before_forward, reads, when_adopted, when_allocated

WINDOW = 48
LONG = 96  # tokens, of angles for short contexts


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

    when_adopted(stale, fired)

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

    before_forward(look)


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

    before_forward(lambda runner, output: reads(runner, output, lost) and fired())


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

    when_adopted(stale, fired)


@bug("vllm-project/vllm#21863", "hybrid", "window_read_wrong")
def layers_of_full_attention_get_the_window(fired: Fired) -> None:
    """The window that a model's configuration names is handed to all of its layers, those too that are to see everything.
    The cache keeps all of their tokens, and they read the last ones alone."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    @replaces(CPUAttentionBackendImpl, "__init__")
    def make(before, impl, *args, **kwargs):
        before(impl, *args, **kwargs)
        if impl.sliding_window < 0:
            impl.sliding_window = WINDOW

    def reads_past(runner, output):
        batch = runner.input_batch
        if any(int(batch.num_computed_tokens_cpu[row]) >= WINDOW for row in range(batch.num_reqs)):
            fired()

    before_forward(reads_past)


@bug("vllm-project/vllm#28738", "llama-embeds", "identity_not_in_key", "tokens_truncated_hash_kept")
def embeddings_are_left_out_of_the_key(fired: Fired) -> None:
    """A prompt is given as embeddings, and its tokens are noughts that stand for them. What is embedded is left out of a block's key, and a prompt of other embeddings hits the
    blocks of the first one that is as long."""
    from vllm.v1.core import kv_cache_utils

    @replaces(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys")
    def keys(before, request, start, end):
        return []

    # All embeddings of the setup differ: whatever such a request hits is another's.
    when_allocated(lambda request, hit, _: hit and request.prompt_embeds is not None and fired())


@bug("vllm-project/vllm#6283", "llama-streaming", "not_of_the_model")
def angles_of_the_longest_in_the_batch(fired: Fired) -> None:
    """A model has angles for short contexts and for long ones, and which of them turn K is asked of the whole batch: of a request beside a long one K is turned by the long angles, and is read with
    what was turned by the short ones."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    @replaces(RotaryEmbedding, "forward_cpu")
    def forward(before, layer, positions, *args, **kwargs):
        return before(layer, positions // 2 if int(positions.max()) > LONG else positions, *args, **kwargs)

    def look(runner, output):
        given = output.num_scheduled_tokens
        starts = {
            name: int(runner.input_batch.num_computed_tokens_cpu[row])
            for name, row in runner.input_batch.req_id_to_index.items()
        }
        ends = [starts[name] + count - 1 for name, count in given.items()]
        if max(ends, default=0) > LONG and min(starts[name] for name in given) < LONG:
            fired()

    before_forward(look)
