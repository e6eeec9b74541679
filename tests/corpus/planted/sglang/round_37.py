"""A thirty-seventh round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from array import array

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "lightseekorg/tokenspeed#293",
    "llama-host-halves-storage",
    "load_of_other_prefix",
    "load_landed_elsewhere",
    origin="tokenspeed",
)
def pages_from_storage_are_inserted_from_the_first_one_on(fired: Fired) -> None:
    """Of a prompt the host has the first pages, and only those behind them are asked of the storage. When they have
    come, they are put into the tree under the prompt's tokens from its first page on, as if the host had had none: each
    page comes to stand for tokens that lie before its own."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    had: dict = {}  # of a request, the tokens whose pages the host had
    under: list = []  # whose pages are inserted
    wrong: set[tuple] = set()  # prefixes that end in such a page
    asked: dict[str, Req] = {}
    holds: dict[int, tuple] = {}  # of a slot, the prefix that was computed there

    @replaces(UnifiedRadixCache, "prefetch_from_storage")
    def prefetch_from_storage(before, cache, request, *args, **kwargs):
        had[request] = list(kwargs.get("matched_prefix_tokens") or ())
        return before(cache, request, *args, **kwargs)

    @replaces(UnifiedRadixCache, "_handle_prefetch_result")
    def _handle_prefetch_result(before, cache, operation):
        under.append((cache, operation.handle))
        try:
            return before(cache, operation)
        finally:
            under.clear()

    @replaces(UnifiedTreeCore, "insert_host")
    def insert_host(before, core, node_id, key, values, hashes):
        if not under or not had.get(under[0][1]):
            return before(core, node_id, key, values, hashes)
        cache, request = under[0]
        tokens = [*had[request], *key.token_ids][: len(key)]
        whole = RadixKey(array("q", tokens), key.extra_key, cache_salt=key.cache_salt)
        made = before(core, cache.root_node_handle(key.extra_key), whole, values, hashes)
        wrong.update((*tokens[:count],) for count in range(made.prefix_len + 1, len(tokens) + 1))
        return made

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    def look(runner, batch, rows):
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            tokens = (*asked[rid].origin_input_ids, *asked[rid].output_ids) if rid in asked else ()
            if any(holds.get(s) != tokens[: n + 1] and tokens[: n + 1] in wrong for n, s in enumerate(prefix)):
                fired()
            own = runner.req_to_token_pool.req_to_token[row, past:end].tolist()
            holds.update({slot: tokens[: past + n + 1] for n, slot in enumerate(own)})

    before_forward(look)


# Zeros are what such a slot held, since nobody had written it.
@bug(
    "tenstorrent/tt-metal#52671",
    "llama-page2-together",
    "bad_values_written",
    "kv_write_damaged", "kv_write_lost",
    origin="TT-Metal",
)  # fmt: skip
def padding_of_the_batch_is_written_over_users(fired: Fired) -> None:
    """What a step's answers have computed is put into the cache in tiles of so many users. A batch that is larger than
    a tile and no multiple of it is filled up with zeros, and these are stored, too: they come to users who have had
    their K and V written already."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    tile = 2
    decodes: list[bool] = [False]

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, keys, values, *args, **kwargs):
        made = before(pool, layer, loc, keys, values, *args, **kwargs)
        over = -len(loc) % tile
        if decodes[0] and len(loc) > tile and over:
            pool.k_buffer[layer][loc[:over]] = 0
            pool.v_buffer[layer][loc[:over]] = 0
        return made

    def look(runner, batch, rows):
        decodes[0] = batch.forward_mode.is_decode()
        if decodes[0] and len(rows) > tile and len(rows) % tile:
            fired()

    before_forward(look)


@bug("antirez/ds4#805", "llama-host-weights-storage", "cache_kept_over_new_weights", origin="DS4")
def files_of_other_weights_are_read(fired: Fired) -> None:
    """What is on the disk is told apart by the model's name and its shape, which weights that have been trained
    further have as well. They are loaded with the same folder: prompts go on from K and V that the weights before have
    computed."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    kept: set[str] = set()
    old: set[str] = set()
    read: list[str] = []
    computed: set[int] = set()

    @replaces(HiCacheFile, "set")
    def set_(before, storage, key, *args, **kwargs):
        kept.add(key)
        return before(storage, key, *args, **kwargs)

    @replaces(HiCacheFile, "get")
    def get(before, storage, key, *args, **kwargs):
        if key in old:
            read.append(key)
        return before(storage, key, *args, **kwargs)

    @replaces(UnifiedRadixCache, "clear_storage_backend")
    def clear_storage_backend(before, cache):
        old.update(kept)
        computed.clear()
        return True

    def look(runner, batch, rows):
        if read and any(not computed.issuperset(prefix) for *_, prefix in rows):
            fired()
        computed.update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug(
    "pegainfer-project/pegainfer#216", "llama-page4-rows", "not_of_the_model", "position_off", origin="pegainfer",
    late="not found: none of its tokens stands at two other positions, by which what turned its K could be told without a model",
)  # fmt: skip
def rest_of_a_hit_that_is_computed_alone_is_turned_from_the_first_place(fired: Fired) -> None:
    """A prompt that is computed alone goes through a path of its own, which counts its places itself and does not look
    at those that it is given. It counts from the first one: what stands behind a hit is turned as if nothing stood
    before it, and put into its pages like that."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    begun: set[str] = set()
    back: list[int] = [0]

    @replaces(RotaryEmbedding, "forward_native")
    def forward_native(before, rotary, positions, *args, **kwargs):
        return before(rotary, positions - back[0], *args, **kwargs)

    def look(runner, batch, rows):
        alone = batch.forward_mode.is_extend() and len(rows) == 1 and batch.rids[0] not in begun
        back[0] = rows[0][0] if alone else 0
        begun.update(batch.rids)
        if back[0]:
            fired()

    before_forward(look)


@bug("sgl-project/sglang#33874", "llama-turns-whole", "hit_before_written", "kv_write_lost")
def place_of_a_step_that_is_not_taken_is_cached(fired: Fired) -> None:
    """While a step is computed the next one is planned: its token has a slot, and counts among those that the request holds. If the step turns out to be the last one, the next is not taken, and the request goes into the tree with all
    that it holds: the last token of its answer is there with a slot into which nobody has written."""
    from sglang.srt.managers.schedule_batch import Req

    pools: list = []
    planned: set[str] = set()
    empty: set[int] = set()

    @replaces(Req, "owned_kv_len")
    def owned_kv_len(before, req):
        if pools and req.finished() and req.kv.holds_kv and req.rid not in planned:
            planned.add(req.rid)
            rows, allocator = pools[0]
            slot = allocator.alloc(1)
            if slot is not None:
                rows.req_to_token[req.kv.req_pool_idx, req.kv.kv_committed_len] = slot[0]
                req.kv.kv_committed_len += 1
                req.kv.kv_allocated_len += 1
                empty.add(int(slot[0]))
        return before(req)

    def look(runner, batch, rows):
        pools[:] = [(runner.req_to_token_pool, runner.token_to_kv_pool_allocator)]
        if any(empty.intersection(prefix) for *_, prefix in rows):
            fired()
        empty.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)
