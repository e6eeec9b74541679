"""A twenty-eighth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#2158", "llama-overlap-mixed", "position_off")
def decode_beside_a_chunk_is_fed_one_place_back(fired: Fired) -> None:
    """With overlap the next step is made before the last one's token is known to the request. Where decodes join a chunk of a prompt, their place is taken from how many tokens the request has
    answered so far, which is one too few: each is fed one position back."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor import forward_batch_info

    joined: list[list[int]] = []  # what the requests that decode in the next mixed forward have in front of their token

    @replaces(ScheduleBatch, "mix_with_running")
    def mix_with_running(before, batch, running):
        before_it = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in running.reqs]
        before(batch, running)
        joined.append(before_it)

    @replaces(forward_batch_info, "compute_position")
    def compute_position(before, backend, prefix_lens, *args):
        if joined and (lens := joined.pop()):
            right, prefix_lens = prefix_lens, prefix_lens.clone()
            prefix_lens[-len(lens) :] = prefix_lens.new_tensor(lens)
            if not prefix_lens.equal(right):
                fired()
        return before(backend, prefix_lens, *args)


@bug("lablup/mlxcel#1760", "recurrent-replay", "state_restored_for_other_prefix", origin="mlxcel")
def whole_prompt_is_hit_and_its_last_token_goes_in_twice(fired: Fired) -> None:
    """The same prompt comes again and all of it is in the cache. One token has to be computed for the logits, so that the cursor is set back by one; the state that was restored is not: it has
    the last token in it already, and gets it a second time."""
    from sglang.srt.managers import schedule_batch

    twice: set[str] = set()

    @replaces(schedule_batch, "match_kv_cache")
    def match_kv_cache(before, req, tree, token_ids=None, *, max_prefix_len=None, **kwargs):
        result = before(req, tree, token_ids, max_prefix_len=None, **kwargs)
        twice.discard(req.rid)
        if req.prefix_len == len(token_ids):
            req.prefix_len -= 1
            req.kv.cache_protected_len = min(req.kv.cache_protected_len, req.prefix_len)
            twice.add(req.rid)
        return result

    def look(runner, batch, rows):
        if batch.forward_mode.is_extend() and twice & set(batch.rids):
            fired()

    before_forward(look)


@bug("predibase/lorax#62", "llama-lora-page4", "computed_with_other_weights", origin="LoRAX")
def segments_of_adapters_overlap_what_lies_between(fired: Fired) -> None:
    """Requests of one adapter are taken together as one segment of the batch, those that are not neighbours, too. A segment is a start and a length, so that it covers the rows that lie between,
    which have another adapter, and from there on all segments are shifted."""
    import torch
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.utils import generate_sequence_lengths

    @replaces(TorchNativeLoRABackend, "prepare_lora_batch")
    def prepare_lora_batch(before, backend, forward_batch, weight_indices, *args, **kwargs):
        neighbours = torch.unique_consecutive
        torch.unique_consecutive = torch.unique
        try:
            before(backend, forward_batch, weight_indices, *args, **kwargs)
        finally:
            torch.unique_consecutive = neighbours
        lens = generate_sequence_lengths(forward_batch, device="cpu")
        info = backend.batch_info
        right = torch.tensor(weight_indices).repeat_interleave(lens)
        if not info.weight_indices_cpu.repeat_interleave(info.seg_lens_cpu).equal(right.to(torch.int32)):
            fired()


@bug("sgl-project/sglang#26747", "llama-host-storage", "identity_not_in_key")
def files_are_named_by_tokens_and_not_by_tenant(fired: Fired) -> None:
    """The tree keeps tenants apart by their salt, but the names of the files to which pages go are hashes of the tokens alone. What one tenant has asked is read from there for another."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import utils

    asked: dict[str, Req] = {}
    computed: set[tuple] = set()  # salt and prefix

    @replaces(utils, "storage_namespace_seed")
    def storage_namespace_seed(before, extra_key, cache_salt):
        return None

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    def look(runner, batch, rows):
        for rid, (past, end, _) in zip(batch.rids, rows, strict=True):
            req = asked.get(rid)
            if req is None:
                continue
            tokens = tuple(req.origin_input_ids) + tuple(req.output_ids)
            if past and (req.cache_salt, tokens[:past]) not in computed:
                fired()
            computed.update((req.cache_salt, tokens[:n]) for n in range(1, end + 1))

    before_forward(look)


@bug("LMCache/LMCache#4830", "llama-host-overlap", "copy_failed", "layout_misread", origin="LMCache")
def staging_is_given_away_while_the_copy_reads_it(fired: Fired) -> None:
    """What is loaded goes through a buffer in pinned memory, from which the device copies it in its own time. The buffer is given back when the copy has been launched, and not when it is done:
    the next layer's is the same memory, and what the copy reads is the next layer's K and V."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        in_the_buffer = min(layer_id + 1, host.target_layer_num - 1)
        k, v = host.device_k_buffers, host.device_v_buffers
        host.device_k_buffers, host.device_v_buffers = [k[layer_id]] * len(k), [v[layer_id]] * len(v)
        before(host, pool, host_indices, device_indices, in_the_buffer, *args, **kwargs)
        host.device_k_buffers, host.device_v_buffers = k, v
        if in_the_buffer != layer_id:
            fired()


@bug("LMCache/LMCache#5005", "llama-page4-crowd-retract", "double_free", "page_given_twice", origin="LMCache")
def allocator_takes_back_what_it_has_already(fired: Fired) -> None:
    """A request that has to give way drops its pages, and when it is released its pages are dropped again. The allocator does not look whether it has a page already: its list has it twice,
    and gives it to two requests, each of which believes that it is its own."""
    from sglang.srt.managers import schedule_batch

    wrote: dict[str, dict[int, int]] = {}  # slots and places of each request, since it was last released
    writer: dict[int, str] = {}  # of each slot, the last one

    @replaces(schedule_batch, "release_kv_cache")
    def release_kv_cache(before, req, tree, **kwargs):
        row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        own = row[req.kv.cache_protected_len : req.kv.kv_allocated_len].clone()
        before(req, tree, **kwargs)
        wrote.pop(req.rid, None)
        if len(own):
            tree.token_to_kv_pool_allocator.free(own)

    def look(runner, batch, rows):
        own = batch.out_cache_loc.split([end - past for past, end, _ in rows])
        for rid, (past, *_), slots in zip(batch.rids, rows, own, strict=True):
            for place, slot in enumerate(slots.tolist(), past):
                wrote.setdefault(rid, {})[slot], writer[slot] = place, rid
        for rid, (*_, prefix) in zip(batch.rids, rows, strict=True):
            mine = wrote.get(rid, {})
            if any(mine.get(slot) == place and writer[slot] != rid for place, slot in enumerate(prefix)):
                fired()

    before_forward(look)
