"""A thirty-second round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#24638", "llama-lora-page16-named", "identity_not_in_key")
def callers_own_key_and_the_adapters_are_one_string(fired: Fired) -> None:
    """The tree keeps requests apart by a string, into which an adapter's name goes and a key of the caller's as well, and nothing says which of them it is. A request for the base model whose key is called as an adapter is
    finds what was computed with that adapter, and goes on from it."""
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import Req

    names: dict[str, str] = {}  # of the ids that loading gives out
    written: dict[int, str] = {}  # of each slot, the adapter that it was computed with

    @replaces(LoRAManager, "_load_lora_adapter")
    def _load_lora_adapter(before, manager, lora_ref):
        names[lora_ref.lora_id] = lora_ref.lora_name
        return before(manager, lora_ref)

    @replaces(Req, "__init__")
    def init(before, req, *args, **kwargs):
        before(req, *args, **kwargs)
        if req.lora_id is not None:
            req.extra_key = req.extra_key.removesuffix(req.lora_id) + names[req.lora_id]

    def look(runner, batch, rows):
        at = 0
        for adapter, (*_, slots) in zip(batch.lora_ids, rows, strict=True):
            if any(written.get(slot, adapter) != adapter for slot in slots):
                fired()
        for adapter, (past, end, _) in zip(batch.lora_ids, rows, strict=True):
            written.update(dict.fromkeys(batch.out_cache_loc[at : at + end - past].tolist(), adapter))
            at += end - past

    before_forward(look)


@bug(
    "LMCache/LMCache-Ascend#270",
    "llama-host-page4-rest",
    "copy_failed",
    "failed_load_counted_loaded",
    origin="LMCache-Ascend",
)
def what_was_found_on_the_host_is_counted_and_not_copied(fired: Fired) -> None:
    """What is found on the host is given slots on the device and reported as loaded; the call that copies it there was lost when the function was written anew. The request goes on behind slots in which
    stands what others have left."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    without: set[int] = set()

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        if layer_id == 0:
            for source, slot in zip(host_indices.tolist(), device_indices.tolist(), strict=True):
                same = host.k_buffer[0][source].equal(pool.k_buffer[0][slot])
                (without.discard if same else without.add)(slot)

    def look(runner, batch, rows):
        if any(without.intersection(prefix) for *_, prefix in rows):
            fired()
        without.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug("Avarok-Cybersecurity/atlas#158", "llama-page4-evicts", "eviction_of_locked_page", origin="Atlas")
def chunks_of_a_prompt_are_put_into_the_tree_and_nobody_holds_them(fired: Fired) -> None:
    """With each chunk, what has been computed of a prompt goes into the tree, so that others may begin with it. It is not locked there: while the rest of the prompt is still to come, it is the first to go when others want
    slots, and the prompt's next chunks read what these have written."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    written: dict[int, int] = {}  # of a slot, the forward that wrote it last
    computed: dict[int, dict[int, int]] = {}  # of a row, the slots of its chunks so far, and who had written them then
    forwards = [0]

    def look(runner, batch, rows):
        for row, (*_, prefix) in zip(batch.req_pool_indices.tolist(), rows, strict=True):
            mine = computed.get(row, {})
            if [*mine] == prefix[: len(mine)] and any(written.get(slot, 0) != one for slot, one in mine.items()):
                fired()
        forwards[0] += 1
        written.update(dict.fromkeys(batch.out_cache_loc.tolist(), forwards[0]))

    before_forward(look)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        before(cache, req, up_to=up_to, **kwargs)
        if up_to < len(req.origin_input_ids) and req.lock is not None:
            row = req.kv.req_pool_idx
            slots = cache.req_to_token_pool.req_to_token[row, :up_to].tolist()
            computed[row] = {slot: written.get(slot, 0) for slot in slots}
            cache.unlock(req.lock)
            req.lock = None


@bug("Blaizzy/mlx-vlm#1983", "llama-page8-answers", "position_off", origin="mlx-vlm")
def each_token_of_an_answer_stands_at_the_beginning(fired: Fired) -> None:
    """Positions are counted from the tokens that a step is given, and not from what lies in the cache already. A prompt that is computed at once is right; each step of its answer has a single token, which is told that it is the first
    one, and is turned as such."""

    def look(runner, batch, rows):
        if batch.forward_mode.is_decode():
            batch.positions = batch.positions.new_zeros(batch.positions.shape)
            fired()

    before_forward(look)
