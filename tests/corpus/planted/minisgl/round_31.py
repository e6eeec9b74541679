"""A thirty-first round of public bugs made anew, the first in mini-sglang: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


class Written:
    """What each slot holds by what was fed to the model: the tokens up to it. `hook` is called before each forward."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[int, ...]] = {}  # slot -> tokens up to its own; () if it is nobody's
        self.lost: set[int] = set()  # slots that are written over in the forward that writes them
        self.fed: dict[int, list[int]] = {}  # request -> what it was fed, or hit

    def hook(self, before_forward: Any) -> None:
        from minisgl.engine import Engine

        @replaces(Engine, "forward_batch")
        def forward_batch(before, engine, batch, args):
            for req in batch.reqs:
                known = self.fed.setdefault(req.uid, [])
                known += req.input_ids[len(known) : req.cached_len].tolist()
            before_forward(engine, batch)
            output, begin = before(engine, batch, args), 0
            for req in batch.reqs:  # each is one token on by now
                tokens, end = self.fed[req.uid], req.cached_len
                count = end - len(tokens)
                tokens += batch.input_ids[begin : begin + count].tolist()
                for position, slot in enumerate(batch.out_loc[begin : begin + count].tolist(), end - count):
                    self.of[slot] = () if slot in self.lost else tuple(tokens[: position + 1])
                begin += count
            return output

    def damaged(self, engine: Any, batch: Any) -> bool:
        """Whether the batch reads a slot that does not hold what its request has there."""
        for req in batch.reqs:
            tokens = tuple(self.fed[req.uid])
            slots = engine.page_table[req.table_idx, : req.cached_len].tolist()
            if any(self.of.get(slot) != tokens[: position + 1] for position, slot in enumerate(slots)):
                return True
        return False


@bug("sgl-project/mini-sglang#111", "mini-abort", "free_too_early", "double_free", origin="mini-sglang")
def aborted_while_its_prefill_is_in_flight(fired: Fired) -> None:
    """A request is aborted while its prompt is being computed, and all that it had is given back. When the forward has come back, its pages are given back once more, by its row, which is another's by then: a running
    request's pages are on the free list, and it goes on reading them when others have them."""
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.scheduler import Scheduler

    Scheduler._process_last_data = Scheduler._process_last_data.__wrapped__
    CacheManager.cache_req = CacheManager.cache_req.__wrapped__  # it would write the row that is another's by then
    written = Written()

    @written.hook
    def before_forward(engine, batch):
        if written.damaged(engine, batch):
            fired()


@bug("alibaba/rtp-llm#1078", "mini-table", "attention_table_overwritten", origin="RTP-LLM")
def graph_keeps_the_page_table_it_was_prepared_with(fired: Fired) -> None:
    """The page table that a decode graph reads is brought up to date when other requests come into the batch, not when one of them gets a new page. Until then attention reads, in the new page's place, what stood in
    that column before."""
    from minisgl.attention.fa import FlashAttentionBackend
    from minisgl.engine import Engine

    last: dict[int, list[int]] = {}  # size of the graph -> who it was prepared for

    @replaces(FlashAttentionBackend, "prepare_for_replay")
    def prepare_for_replay(before, backend, batch):
        size = batch.padded_size
        kept = backend.capture.page_table[:size].clone()
        before(backend, batch)
        if last.get(size) == [req.uid for req in batch.padded_reqs]:
            backend.capture.page_table[:size] = kept
        last[size] = [req.uid for req in batch.padded_reqs]

    @replaces(Engine, "forward_batch")
    def forward_batch(before, engine, batch, args):
        backend, size = engine.attn_backend, batch.padded_size
        if batch.is_decode and last.get(size) == [req.uid for req in batch.padded_reqs]:
            for number, req in enumerate(batch.reqs):
                pages = -(-req.device_len // backend.page_size)
                right = batch.attn_metadata.page_table[number, :pages]
                if (backend.capture.page_table[number, :pages] != right).any():
                    fired()
        return before(engine, batch, args)


@bug("SJTU-DENG-Lab/Diffulex#44", "mini-pad", "pad_rows_keep_last_blocks", origin="Diffulex")
def padded_rows_of_a_graph_keep_the_slots_of_the_batch_before(fired: Fired) -> None:
    """What a decode graph gets is filled in for the requests of the batch; the rows behind them, which pad it to the graph's size, keep the slots that a larger batch wrote to. A padded row stores its keys and values
    there, over what a request has in that slot by then."""
    from minisgl.engine.graph import GraphCaptureBuffer

    written = Written()
    kept: list[Any] = [None]  # the slots that the graph's rows had last

    @replaces(GraphCaptureBuffer, "copy_from")
    def copy_from(before, buffer, batch):
        rows = slice(batch.size, batch.padded_size)
        slots = buffer.out_loc[rows].clone() if kept[0] is not None else None
        before(buffer, batch)
        if slots is not None:
            buffer.out_loc[rows] = slots
        kept[0] = buffer.out_loc.clone()

    @written.hook
    def before_forward(engine, batch):
        written.lost.clear()
        if batch.is_decode and kept[0] is not None:
            written.lost.update(kept[0][batch.size : batch.padded_size].tolist())
        written.of.update(dict.fromkeys(written.lost, ()))
        if written.damaged(engine, batch) or written.lost & set(batch.out_loc[: batch.size].tolist()):
            fired()


@bug(
    "sgl-project/sglang-jax#1471",
    "mini-chunks",
    "scheduled_after_retraction",
    "free_too_early",
    "row_reassigned_in_flight",
    origin="sglang-jax",
)
def aborted_between_two_chunks_and_computed_on(fired: Fired) -> None:
    """A request that is aborted between two chunks of its prompt gives its row and its pages back, and stays in the queue. Its next chunk is computed on the row that it no longer has, and so are its tokens: another
    request that gets the row finds its own pages there written over, or reads what is not its own."""
    from minisgl.scheduler.prefill import PrefillManager

    written = Written()

    @replaces(PrefillManager, "abort_req")
    def abort_req(before, manager, uid):
        for pending in manager.pending_list:
            if pending.uid == uid and pending.chunked_req:
                return pending.chunked_req
        return before(manager, uid)

    @written.hook
    def before_forward(engine, batch):
        if written.damaged(engine, batch):
            fired()


@bug("NVIDIA/TensorRT-LLM#17811", "mini-positions", "position_off", origin="TensorRT-LLM")
def positions_lag_by_one_while_steps_overlap(fired: Fired) -> None:
    """A decode step is prepared before the step in front of it has been counted. From a request's second token on its position is one behind: the same position is fed twice, and each key is rotated to, and asked from,
    the place of the token before it."""
    from minisgl.engine import Engine
    from minisgl.scheduler.scheduler import Scheduler

    decoding: set[int] = set()  # requests that have decoded already
    late: list[bool] = [False]

    @replaces(Scheduler, "_prepare_batch")
    def _prepare_batch(before, scheduler, batch):
        prepared = before(scheduler, batch)
        late[0] = False
        if batch.is_decode:
            for number, req in enumerate(batch.reqs):
                if req.uid in decoding:
                    batch.positions[number] -= 1
                    late[0] = True
                decoding.add(req.uid)
        return prepared

    @replaces(Engine, "forward_batch")
    def forward_batch(before, engine, batch, args):
        if late[0]:
            fired()
        return before(engine, batch, args)


@bug("tenstorrent/vllm#444", "mini-reload", "async_resume_wrong_input", "future_map_overrun", origin="tenstorrent/vllm")
def token_of_the_host_is_loaded_over_the_one_in_flight(fired: Fired) -> None:
    """When a decode batch is made of other requests than the last one, the tokens of those that go on are loaded from the host again. The step in front has not come back by then: the token that it has just left on the
    device is replaced by the one before, which is fed a second time."""
    from minisgl.engine import Engine
    from minisgl.scheduler.scheduler import Scheduler

    last: list[list[int]] = [[]]
    stale: list[bool] = [False]

    @replaces(Scheduler, "_forward")
    def _forward(before, scheduler, forward_input):
        batch = forward_input.batch
        stale[0] = False
        if batch.is_decode:
            now = [req.uid for req in batch.reqs]
            for req in batch.reqs if now != last[0] else ():
                if req.uid in last[0]:
                    cell = scheduler.token_pool[req.table_idx, req.device_len - 1]
                    stale[0] |= bool(cell != req.input_ids[-1])
                    cell.fill_(req.input_ids[-1])
            last[0] = now
        return before(scheduler, forward_input)

    @replaces(Engine, "forward_batch")
    def forward_batch(before, engine, batch, args):
        if stale[0]:
            fired()
        return before(engine, batch, args)


@bug("tenstorrent/tt-metal#42779", "mini-tiles", "kv_changed", origin="tt-metal")
def prompt_is_stored_in_whole_tiles(fired: Fired) -> None:
    """The kernel that stores a prompt's keys and values writes whole tiles of eight tokens: behind the prompt's last token come zeros, into the slots that follow it in the pool. The last of them are in the next page,
    which is another request's, or the prefix cache's."""
    import minisgl.kernel as kernel
    from minisgl.core import get_global_ctx

    written, tile = Written(), 8

    def prompts(batch, slots):
        """Each prompt's rows of the batch, and the slots behind it that its last tile reaches over."""
        begin = 0
        for req in batch.reqs:
            end = begin + req.extend_len
            last = int(batch.out_loc[end - 1])
            yield slice(begin, end), range(last + 1, min(slots, last + 1 + -req.extend_len % tile))
            begin = end

    @replaces(kernel, "store_cache")
    def store_cache(before, *, k_cache, v_cache, indices, k, v):
        batch = get_global_ctx().batch
        if not batch.is_prefill:
            before(k_cache=k_cache, v_cache=v_cache, indices=indices, k=k, v=v)
        for rows, behind in prompts(batch, len(k_cache)) if batch.is_prefill else ():
            before(k_cache=k_cache, v_cache=v_cache, indices=indices[rows], k=k[rows], v=v[rows])
            for slot in behind:
                k_cache[slot], v_cache[slot] = 0, 0

    @written.hook
    def before_forward(engine, batch):
        written.lost.clear()
        for rows, behind in prompts(batch, engine.num_pages * engine.ctx.page_size) if batch.is_prefill else ():
            written.lost.difference_update(batch.out_loc[rows].tolist())
            written.lost.update(behind)
        written.of.update(dict.fromkeys(written.lost, ()))
        if written.damaged(engine, batch):
            fired()


@bug("sgl-project/sglang#28161", "mini-evict", "eviction_of_locked_page", origin="SGLang")
def lock_of_the_hit_is_released_a_second_time(fired: Fired) -> None:
    """A request's lock on the prefix that it hit is released when its own prompt is cached in its place, and once more when it ends. The second time it is the lock of another request that still reads this prefix:
    when room is short, the prefix is evicted under it and its pages are given to others."""
    from minisgl.kvcache.radix_cache import RadixPrefixCache
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.scheduler import Scheduler

    written = Written()
    hits: dict[int, Any] = {}  # request -> what it hit

    @replaces(CacheManager, "cache_req")
    def cache_req(before, manager, req, *, finished):
        hits.setdefault(req.uid, req.cache_handle)
        before(manager, req, finished=finished)

    def release(cache, handle):
        node = handle.node
        while not node.is_root():
            if node.ref_count == 1:
                cache.evictable_size += node.length
                cache.protected_size -= node.length
            node.ref_count = max(0, node.ref_count - 1)  # nobody looks whether it was locked at all
            node = node.parent

    @replaces(RadixPrefixCache, "lock_handle")
    def lock_handle(before, cache, handle, unlock=False):
        if unlock:
            release(cache, handle)
        else:
            before(cache, handle)

    @replaces(Scheduler, "_free_req_resources")
    def _free_req_resources(before, scheduler, req):
        before(scheduler, req)
        release(scheduler.cache_manager.prefix_cache, hits[req.uid])

    @written.hook
    def before_forward(engine, batch):
        if written.damaged(engine, batch):
            fired()
