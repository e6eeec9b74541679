"""A thirty-first round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "sgl-project/sglang#30845",
    "hybrid-page4-branches",
    "stale_prefix_hit",
    "swa_window_off_by_one",
)
def prompt_in_chunks_is_put_into_the_tree_with_what_its_window_left(fired: Fired) -> None:
    """A prompt in chunks gives back the window's slots that it has left behind before a chunk goes into the tree. How far it has given them back is passed on when a request ends and not between two chunks: the tree lists them as if they
    were there. Who leaves that prompt in the middle hits a window without K and V of its own."""
    from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent

    gone: set[int] = set()

    @replaces(SWAComponent, "free_out_of_window_slots")
    def free_out_of_window_slots(before, component, req, pre_len, insert_params):
        before(component, req, pre_len, insert_params)
        left = insert_params.get_evicted_seqlen(component.component_type)
        if not req.finished() and left:
            row = component.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            gone.update(row[req.kv.cache_protected_len : left].tolist())
            insert_params.set_evicted_seqlen(component.component_type, 0)

    def look(runner, batch, rows):
        leads_to = runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
        for *_, prefix in rows if batch.forward_mode.is_extend() else ():
            if any(not leads_to[slot] for slot in gone.intersection(prefix[-16:])):
                fired()
        gone.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug("sgl-project/sglang#8261", "llama-lora-page8-renewed", "identity_not_in_key", "cache_kept_over_new_weights")
def adapter_is_known_to_the_tree_by_its_name(fired: Fired) -> None:
    """What was computed with an adapter is kept under the adapter's name. It is unloaded and another version is loaded that has the same name: who asks again what was asked before hits K and V of the version that
    is gone."""
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import Req

    names: dict[str, str] = {}  # of the ids that loading gives out
    first: dict[str, str] = {}  # the first id of a name
    written: dict[int, str] = {}  # of each slot, the id that it was computed with

    @replaces(LoRAManager, "_load_lora_adapter")
    def _load_lora_adapter(before, manager, lora_ref):
        names[lora_ref.lora_id] = lora_ref.lora_name
        return before(manager, lora_ref)

    @replaces(Req, "__init__")
    def init(before, req, *args, **kwargs):
        before(req, *args, **kwargs)
        if req.lora_id is not None:
            known = first.setdefault(names[req.lora_id], req.lora_id)
            req.extra_key = req.extra_key.removesuffix(req.lora_id) + known

    def look(runner, batch, rows):
        at = 0
        for adapter, (*_, slots) in zip(batch.lora_ids, rows, strict=True):
            if any(written.get(slot, adapter) != adapter for slot in slots):
                fired()
        for adapter, (past, end, _) in zip(batch.lora_ids, rows, strict=True):
            written.update(dict.fromkeys(batch.out_cache_loc[at : at + end - past].tolist(), adapter))
            at += end - past

    before_forward(look)


@bug("Neroued/ninfer#73", "llama-host-page4-branches", "load_of_other_prefix", origin="NInfer")
def branch_gets_what_its_sibling_has_on_the_host(fired: Fired) -> None:
    """Prompts that begin alike are kept on the host as one beginning with branches. What belongs to a branch is looked up by where it stands behind that beginning, and of several branches the one that was kept last is found: a
    prompt goes on from its sibling's K and V."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    stands: dict[int, tuple[int, int]] = {}  # of a slot of the device: its place, and all that stands up to it
    kept: dict[int, dict[int, int]] = {}  # of a place: what stands there, and its slot on the host
    holds: dict[int, tuple[int, int]] = {}  # of a slot of the host
    wrong: set[int] = set()

    @replaces(MHATokenToKVPoolHost, "backup_from_device_all_layer")
    def backup_from_device_all_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        before(host, pool, host_indices, device_indices, *args, **kwargs)
        for target, slot in zip(host_indices.tolist(), device_indices.tolist(), strict=True):
            if slot in stands:
                place, front = holds[target] = stands[slot]
                kept.setdefault(place, {}).pop(front, None)
                kept[place][front] = target

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        found = [
            list(kept.get(holds[one][0], {one: one}).values())[-1] if one in holds else one
            for one in host_indices.tolist()
        ]
        if layer_id == 0:
            for right, taken, slot in zip(host_indices.tolist(), found, device_indices.tolist(), strict=True):
                same = host.k_buffer[0][right].equal(host.k_buffer[0][taken])
                (wrong.discard if same else wrong.add)(slot)
                if right in holds:
                    stands[slot] = holds[right]
        return before(host, pool, host_indices.new_tensor(found), device_indices, layer_id, *args, **kwargs)

    def look(runner, batch, rows):
        if any(wrong.intersection(prefix) for *_, prefix in rows):
            fired()
        tokens, slots, at = batch.input_ids.tolist(), batch.out_cache_loc.tolist(), 0
        wrong.difference_update(slots)
        for past, end, prefix in rows:
            front = stands.get(prefix[-1], (0, 0))[1] if prefix else 0
            for place in range(past, end):
                front = hash((front, tokens[at]))
                stands[slots[at]] = (place, front)
                at += 1

    before_forward(look)
