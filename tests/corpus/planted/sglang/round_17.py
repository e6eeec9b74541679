"""A seventeenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


@bug("sgl-project/sglang#34399", "llama-page4-small", "page_given_twice")
def pages_counted_behind_the_end_of_the_list(fired: Fired) -> None:
    """Pages are handed out before it is looked at how many are free, and a place behind the end of the free list is taken for the last one. The last page is there for two
    places of the batch at once."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(PagedTokenToKVPoolAllocator, "alloc_extend")
    def alloc_extend(before, allocator, prefix, prefix_cpu, ends, ends_cpu, last, count, *args, **kwargs):
        page, free = allocator.page_size, allocator.free_pages
        needed = (-(-ends_cpu // page) + -prefix_cpu // page).tolist()
        given = before(allocator, prefix, prefix_cpu, ends, ends_cpu, last, count, *args, **kwargs)
        there = sum(needed[:-1])
        if given is not None and not lost and there and needed[-1] and len(free) < 30:
            for beyond in free[there : sum(needed)].tolist():
                moved = given // page == beyond
                given[moved] = given[moved] % page + int(free[there - 1]) * page
            lost.update(range(int(free[there - 1]) * page, (int(free[there - 1]) + 1) * page))
            allocator.free_pages = free[there:]
        return given


@bug(
    "sgl-project/sglang-jax#1487", "llama-overlap-page16", "future_map_overrun", "next_token_swap", origin="SGLang JAX"
)
def ring_of_tokens_to_come_is_lapped(fired: Fired) -> None:
    """Tokens that are still to be sampled have places in a ring, and a padded prefill takes as many as it has rows with its padding. When the ring comes round, what a
    request waits for has been written over with what a later batch has sampled."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    fed: dict[int, int] = {}  # of a row, the token that it was fed last
    done: list[int] = []

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        own = batch.req_pool_indices.tolist()
        if batch.forward_mode.is_decode():
            new = [row for row in own if row not in fed]
            old = [row for row in own if row in fed]
            if new and old and not done:
                at, token = own.index(old[0]), int(batch.input_ids[own.index(new[-1])])
                if int(batch.input_ids[at]) != token:
                    done.append(at)
                    fired()
                    batch.input_ids = batch.input_ids.clone()
                    batch.input_ids[at] = token
            fed.clear()
            fed.update(zip(own, batch.input_ids.tolist(), strict=True))
        return before(runner, batch, *args, **kwargs)


@bug("sgl-project/sglang#984", "llama-no-tree", "req_to_token")
def next_chunk_does_not_know_the_one_before(fired: Fired) -> None:
    """Without a prefix cache nobody tells a request which slots its chunk has taken, and the next chunk begins with a row that is filled as it was before: with what the
    request has known at its first chunk, and behind it with what the row's last owner has left."""
    left: dict[int, object] = {}  # of a row, what stood there when its request began

    def look(runner, batch, rows):
        table = runner.req_to_token_pool.req_to_token
        for row, (prefix, _, slots) in zip(batch.req_pool_indices.tolist(), rows, strict=True):
            if batch.forward_mode.is_decode():
                left[row] = table[row].clone()
            elif prefix:
                old = left.get(row, table[row] * 0)
                if old[prefix // 2 : prefix].tolist() != slots[prefix // 2 :]:
                    fired()
                    table[row, prefix // 2 : prefix] = old[prefix // 2 : prefix]

    before_forward(look)


@bug("sgl-project/sglang#31369", "recurrent", "state_restored_for_other_prefix")
def state_is_put_down_under_the_next_length(fired: Fired) -> None:
    """How far a request has come is moved on before the step that computes it has ended, and a state that is kept is put down under that length. It is one token behind what
    the prefix cache says that it stands for."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    saved: list[int] = []
    known: set[str] = set()

    def look(runner, batch, rows):
        for name, (prefix, *_) in zip(batch.rids, rows, strict=True):
            if saved and prefix and name not in known:
                fired()
            known.add(name)

    before_forward(look)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, **kwargs):
        pool = cache.req_to_token_pool
        slot = int(pool.req_index_to_mamba_index_mapping[req.kv.req_pool_idx])
        parts = pool.mamba_pool.mamba_cache.conv
        own = [part[:, slot].clone() for part in parts]
        for part, state in zip(parts, own, strict=True):
            behind = state.roll(1, -1)
            behind[..., 0] = 0
            part[:, slot] = behind
        saved.append(slot)
        before(cache, req, **kwargs)
        if not req.finished():
            for part, state in zip(parts, own, strict=True):
                part[:, slot] = state


@bug(
    "FlashML-org/FreeToken#204",
    "hybrid-page16",
    "double_free",
    "page_given_twice",
    "stale_swa_mapping",
    origin="FreeToken",
)
def full_page_is_in_the_free_list_twice(fired: Fired) -> None:
    """A page of the layers that see everything is given back twice, and is handed to two owners. The second takes a page of the window's pool for it, and the mapping of the
    first is gone."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    lost: set[int] = set()
    once_written_again(fired, lost)

    def twice(before, allocator, free_index, *, start_pos):
        before(allocator, free_index, start_pos=start_pos)
        if not lost and len(free_index):
            page = free_index[: allocator.page_size]
            first = int(page[0]) // allocator.page_size * allocator.page_size
            lost.update(range(first, first + allocator.page_size))
            allocator.full_attn_allocator.free_segment(page.clone(), start_pos=start_pos)

    replaces(SWATokenToKVPoolAllocator, "free_segment")(twice)
    replaces(SWATokenToKVPoolAllocator, "free_full_segment")(twice)
