"""A thirty-fourth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#22811", "llama-host-page2-overlap", "read_before_landed")
def one_half_is_read_without_waiting_for_its_layer(fired: Fired) -> None:
    """What comes back from the host comes layer by layer, and whoever reads a layer waits for it. One of the ways to get at the keys does not wait: the forward reads what stood in these slots before, and the keys land when it is over.
    The values have been waited for."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.model_executor.model_runner import ModelRunner

    under_way: list = []  # keys of a layer, the slots that they belong into, and what they are

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        keys = host.device_k_buffers[layer_id]
        old = keys[device_indices].clone()
        before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)
        under_way.append((keys, device_indices.clone(), keys[device_indices].clone()))
        keys[device_indices] = old

    def look(runner, batch, rows):
        read = {slot for *_, prefix in rows for slot in prefix}
        for keys, slots, right in under_way:
            if read & set(slots.tolist()) and not keys[slots].equal(right):
                fired()

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        result = before(runner, batch, *args, **kwargs)
        for keys, slots, right in under_way:
            keys[slots] = right
        under_way.clear()
        return result

    before_forward(look)


@bug("osaurus-ai/vmlx-swift#426", "recurrent-ends", "state_restored_for_other_prefix", origin="vMLX")
def attention_comes_back_shorter_than_the_state(fired: Fired) -> None:
    """Of a prefix that is hit, attention's part is as long as the K and V that came back, and the recurrent state is taken for the place that was matched. The two are not compared: a few tokens behind the end of K and V are fed once
    more, into a state that has seen them."""
    from sglang.srt.managers import schedule_batch

    ahead: set[str] = set()

    @replaces(schedule_batch, "match_kv_cache")
    def match_kv_cache(before, req, tree, *args, **kwargs):
        result = before(req, tree, *args, **kwargs)
        if req.prefix_len > 8:
            req.prefix_len -= 5
            ahead.add(req.rid)
        return result

    def look(runner, batch, rows):
        if batch.forward_mode.is_extend() and any(
            rid in ahead and past for rid, (past, *_) in zip(batch.rids, rows, strict=True)
        ):
            fired()

    before_forward(look)


@bug("LMCache/LMCache#2403", "llama-host-page16", "layout_misread", origin="LMCache")
def pages_are_read_with_heads_in_front_of_tokens(fired: Fired) -> None:
    """A page of the host holds its tokens one behind another, each with all its heads. The kernel that brings it back computes addresses as if it held its heads one behind another, each with all its tokens: every row of the page but the
    first and the last gets pieces of other tokens."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    wrong: set[int] = set()

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)
        for half in (host.device_k_buffers[layer_id], host.device_v_buffers[layer_id]):
            right = half[device_indices]
            _, heads, width = right.shape
            pages = right.reshape(-1, heads, host.page_size, width).transpose(1, 2)
            half[device_indices] = pages.reshape(right.shape)
            differs = (half[device_indices] != right).flatten(1).any(1)
            wrong.update(device_indices[differs].tolist())

    def look(runner, batch, rows):
        if any(wrong.intersection(prefix) for *_, prefix in rows):
            fired()
        wrong.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)
