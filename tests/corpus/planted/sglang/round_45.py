"""A forty-fifth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward
from .round_40 import once_it_reads_what_came_back_wrong


@bug(
    "ggml-org/llama.cpp#24875",
    "llama-page8-lengths",
    "not_of_the_model",
    origin="llama.cpp",
    late="not found: too few tokens come again at their place for what turns their keys to be learnt without a model",
)
def long_request_has_all_of_its_batch_turned_for_long_ones(fired: Fired) -> None:
    """A model has two lists of factors by which places are turned, one for sequences that fit into its first context
    and one for longer ones. Which is taken is told by the furthest place of a batch, for all that is in it: keys of short
    requests are turned for long ones as long as one stands beside them. What a sequence has stored before it or its
    neighbour became long stays as it was, and is read with the rest."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    first_context = 64
    is_long: list[bool] = [False]
    tables: dict[int, torch.Tensor] = {}  # of a layer's rotary embedding, cosines and sines for long sequences

    def stretched(rotary):
        pace = rotary._compute_inv_freq(rotary.base)
        places = torch.arange(len(rotary.cos_sin_cache), dtype=torch.float)
        angles = torch.outer(places, pace / torch.linspace(1.0, 16.0, len(pace)))
        return torch.cat((angles.cos(), angles.sin()), -1).to(rotary.cos_sin_cache.dtype)

    @replaces(RotaryEmbedding, "forward_native")
    def forward_native(before, rotary, *args, **kwargs):
        if not is_long[0]:
            return before(rotary, *args, **kwargs)
        short = rotary.cos_sin_cache
        if id(rotary) not in tables:
            tables[id(rotary)] = stretched(rotary)
        rotary.cos_sin_cache = tables[id(rotary)]
        try:
            return before(rotary, *args, **kwargs)
        finally:
            rotary.cos_sin_cache = short

    def look(runner, batch, rows):
        is_long[0] = any(end > first_context for _, end, _ in rows)
        if is_long[0] and any(past or end <= first_context for past, end, _ in rows):
            fired()

    before_forward(look)


# What is loaded is what was computed for another prefix, whole; what overwrote it was right where it came from.
@bug(
    "kvcache-ai/Mooncake#3826",
    "llama-host-halves-twice-storage",
    "stored_wrong",
    "load_of_other_prefix",
    "host_copy_overwritten",
    origin="Mooncake",
)
def storage_that_is_mounted_anew_gives_away_what_is_in_use(fired: Fired) -> None:
    """When a storage comes back, what is known of its objects is restored, with the places they lie at, but whoever
    gives out places begins with an empty list. New objects are put where old ones lie. The old ones are still said to be
    complete, and who asks for one of them is given what has been put over it."""
    from pathlib import Path

    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    until_it_is_mounted_anew = 36  # objects
    at: list[str] = []  # which object lies at each place
    given: list[int] = [0]  # how many places have been given out since it was mounted
    anew: list[bool] = []  # whether that was for the second time

    @replaces(HiCacheFile, "set")
    def set_(before, storage, key, value=None, *args, **kwargs):
        if storage.exists(key):
            return before(storage, key, value, *args, **kwargs)
        if given[0] == until_it_is_mounted_anew and not anew:
            anew.append(True)
            given[0] = 0
        kept = before(storage, key, value, *args, **kwargs)
        if given[0] < len(at):
            old = Path(storage.file_path, f"{storage._get_suffixed_key(at[given[0]])}.bin")
            if old.exists():
                old.write_bytes(value.contiguous().view(torch.uint8).numpy().tobytes())
            at[given[0]] = key
        else:
            at.append(key)
        given[0] += 1
        return kept

    once_it_reads_what_came_back_wrong(fired)


@bug("Blaizzy/mlx-vlm#1715", "hybrid-page2-ring", "window_read_wrong", origin="mlx-vlm")
def ring_of_the_window_is_cut_as_if_it_were_flat(fired: Fired) -> None:
    """Layers with a window keep as many tokens as it has in a ring. A prompt that leaves an earlier one on the way is
    given what the cache has of their beginning, which is cut off by its length. In the ring what lies in front of that
    are the earlier prompt's last tokens: the layers with a window look at those, and not at what stands before the fork."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.schedule_batch import Req

    asked: dict[str, Req] = {}
    had: dict[str, tuple[list[int], list[int]]] = {}  # of each request, its tokens and its slots, as far as computed
    kept: dict[
        str, dict[int, int]
    ] = {}  # of a request that went on in another's ring, by place, the slot that lies there
    here: dict[int, dict[int, int]] = {}  # the same of this batch, by row

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    def ring(runner, tokens, past, prefix):
        window = runner.sliding_window_size
        longer = [s for t, s in had.values() if len(s) > past and t[:past] == tokens[:past] and s[:past] == prefix]
        slots = max(longer, key=len, default=[])
        if len(slots) <= window:
            return {}
        lies = {place % window: place for place in range(len(slots) - window, len(slots))}
        there = runner.token_to_kv_pool.full_to_swa_index_mapping
        found = {place: slots[lies[place % window]] for place in range(max(0, past - window), past)}
        return {place: slot for place, slot in found.items() if slot != prefix[place] and int(there[slot]) > 0}

    def look(runner, batch, rows):
        here.clear()
        table = runner.req_to_token_pool.req_to_token
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            tokens = [*asked[rid].origin_input_ids, *asked[rid].output_ids][:end] if rid in asked else []
            if rid not in had and past:
                kept[rid] = ring(runner, tokens, past, prefix)
            here[row] = kept.get(rid, {})
            if any(place > past - runner.sliding_window_size for place in here[row]):
                fired()
            had[rid] = tokens, table[row, :end].tolist()

    def turned(table, rows):
        own = table[rows].clone()
        for number, row in enumerate(rows.tolist()):
            for place, slot in here.get(row, {}).items():
                own[number, place] = slot
        return own, torch.arange(len(own))

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):

        @replaces(TorchNativeAttnBackend, name)
        def run(before, backend, query, output, keys, values, table, rows, *args, sliding_window_size=None, **kwargs):
            if sliding_window_size is not None and any(here.values()):
                table, rows = turned(table, rows)
            more = {**kwargs, "sliding_window_size": sliding_window_size}
            return before(backend, query, output, keys, values, table, rows, *args, **more)

    before_forward(look)


@bug("ohdearquant/lattice#43", "llama-lora-page2-tenants", "computed_with_other_weights", origin="lattice")
def prompts_are_computed_in_one_go_without_the_adapter(fired: Fired) -> None:
    """Tokens of an answer go through a path that adds what the request's adapter has to each projection. A prompt is
    computed in one go by a path of its own, in which nobody has called the adapter: its keys and values are those of the
    model alone, and the answer goes on from them with the adapter."""
    from sglang.srt.lora.lora_manager import LoRAManager

    @replaces(LoRAManager, "prepare_lora_batch")
    def prepare_lora_batch(before, manager, batch):
        own = batch.lora_ids
        if not batch.forward_mode.is_extend() or not any(own):
            return before(manager, batch)
        manager.fetch_new_loras({*own, None})
        batch.lora_ids = [None] * len(own)
        fired()
        try:
            return before(manager, batch)
        finally:
            batch.lora_ids = own


@bug(
    "marin-community/levanter#1268",
    "llama-page4-clones-no-tree",
    "position_off",
    "attention_seq_len_wrong",
    "draft_position_plus_one",
    origin="Levanter",
)
def clones_take_over_a_length_that_is_counted_up_once_more(fired: Fired) -> None:
    """Several answers to one prompt are clones of the first request. When they are handed its last page they are given
    its length along, which counts the token that it has just sampled, and their own first token is counted on top of
    that. Each clone goes on one place further than it is: a place of its page stays as it was found, and is read."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode

    prompts: dict[tuple[int, ...], str] = {}  # who asked it first
    clones: set[str] = set()  # that have not gone on so far

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        if prompts.setdefault(tuple(req.origin_input_ids), rid) != rid:
            clones.add(rid)

    @replaces(schedule_batch, "alloc_for_decode")
    def alloc_for_decode(before, batch, *args, **kwargs):
        slots = before(batch, *args, **kwargs)
        rows = torch.tensor([n for n, req in enumerate(batch.reqs) if req.rid in clones], dtype=torch.long)
        if not len(rows):
            return slots
        ahead = torch.zeros_like(batch.seq_lens)
        ahead[rows] = 1
        batch.seq_lens = batch.seq_lens + ahead
        batch.seq_lens_cpu = batch.seq_lens_cpu + ahead.to(batch.seq_lens_cpu.dtype)
        batch.orig_seq_lens = batch.orig_seq_lens + ahead.to(batch.orig_seq_lens.dtype)
        table_rows = batch.req_pool_indices[rows]
        further = alloc_paged_token_slots_decode(
            tree_cache=batch.tree_cache,
            seq_lens=batch.seq_lens[rows] + 1,
            seq_lens_cpu=batch.seq_lens_cpu[rows] + 1,
            last_loc=slots[rows],
            token_per_req=1,
            req_pool_indices=table_rows,
            batch=batch,
        )
        batch.req_to_token_pool.write((table_rows, batch.seq_lens[rows]), further.to(torch.int32))
        slots = slots.clone()
        slots[rows] = further
        for row in rows.tolist():
            batch.reqs[row].kv.kv_allocated_len += 1
            batch.reqs[row].kv.kv_committed_len += 1
            clones.discard(batch.reqs[row].rid)
        fired()
        return slots
