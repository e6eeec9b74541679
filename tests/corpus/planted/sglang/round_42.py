"""A forty-second round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


# The layers without a window have what belongs there, so that a slot is written in one part and not in the other.
@bug("sgl-project/sglang-jax#1606", "hybrid-page4-inside", "kv_write_lost", "kv_write_damaged", origin="SGLang JAX")
def blocks_in_front_of_the_last_queries_window_are_not_stored(fired: Fired) -> None:
    """The kernel stores what is new of K and V while it goes over the blocks for a prompt's last queries. A layer with
    a window passes over the blocks in front of that of these queries, and what they hold is never stored. Nobody who is
    computed then misses it; a prompt that leaves this one further in front looks at slots without it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    block = 8
    passed: list[int] = []  # rows of the batch's tokens
    lost: set[int] = set()

    def look(runner, batch, rows):
        window = runner.sliding_window_size
        if any(lost.intersection(prefix[max(0, past - window) :]) for past, _, prefix in rows):
            fired()
        passed.clear()
        lost.difference_update(batch.out_cache_loc.tolist())
        if batch.forward_mode.is_decode():
            return
        at = 0
        for past, end, _ in rows:
            last = past + (end - past - 1) // block * block
            first = (last - window) // block * block  # the block in which the window of the last queries begins
            passed.extend(range(at, at + max(0, min(end, first) - past)))
            at += end - past
        lost.update(batch.out_cache_loc[passed].tolist())

    # Who is computed has its K and V at hand, and does not look for them in the pool.
    @replaces(TorchNativeAttnBackend, "forward_extend")
    def forward_extend(before, backend, query, keys, values, layer, *args, **kwargs):
        if not passed or layer.sliding_window_size is None or layer.sliding_window_size < 0:
            return before(backend, query, keys, values, layer, *args, **kwargs)
        pool, slots = backend.token_to_kv_pool, backend.swa_out_cache_loc[passed]
        buffers = (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        there = [buffer[slots].clone() for buffer in buffers]
        try:
            return before(backend, query, keys, values, layer, *args, **kwargs)
        finally:
            for buffer, old in zip(buffers, there, strict=True):
                buffer[slots] = old

    before_forward(look)


@bug("vllm-project/vllm#40766", "recurrent-tails-mixed", "state_restored_for_other_prefix", origin="vLLM")
def layers_with_states_take_the_decodes_to_be_in_front(fired: Fired) -> None:
    """A batch may have prompts and decodes in it. It is put together with the prompts in front, and the layers with
    states come from where the decodes are: they cut it as if it began with one token for each decode. Tokens of a
    prompt go into its state and into those of the decodes behind it, each with the wrong piece."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    cut: list[tuple[list[int], list[bool]]] = []  # in a mixed forward, how long each piece is and whether it goes on

    @replaces(ShortConvAttnBackend, "conv_state_metadata")
    def conv_state_metadata(before, backend, *args, **kwargs):
        made = before(backend, *args, **kwargs)
        if not cut:
            return made
        counts, goes_on = cut[0]
        starts = torch.tensor([0, *counts]).cumsum(0).to(made.query_start_loc.dtype)
        return made._replace(
            query_start_loc=starts,
            has_initial_state=torch.tensor(goes_on),
            has_prefix_cpu=goes_on,
        )

    def look(runner, batch, rows):
        cut.clear()
        if not batch.forward_mode.is_mixed():
            return
        pieces = [(end - past, past > 0) for past, end, _ in rows]
        decodes = 0
        while decodes < len(pieces) and pieces[-1 - decodes] == (1, True):
            decodes += 1
        if 0 < decodes < len(pieces):
            turned = pieces[len(pieces) - decodes :] + pieces[: len(pieces) - decodes]
            cut.append(([count for count, _ in turned], [goes_on for _, goes_on in turned]))
            fired()

    before_forward(look)


@bug("LMCache/LMCache#3022", "llama-host-halves-storage", "failed_load_counted_loaded", origin="LMCache")
def pages_that_had_a_place_and_were_not_read_are_handed_back(fired: Fired) -> None:
    """What is to be read from the disk gets its places on the host first, page by page, and is read when all have one.
    When there are no more places the loop is left early: nothing is read, and those pages that have got a place are
    handed back as if they had been. The prompt goes on from what was in that memory."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    places = 7  # how many pages can wait to be read
    unread: set[int] = set()  # on the host
    wrong: set[int] = set()  # on the device

    @replaces(HiCacheController, "_generic_page_get")
    def _generic_page_get(before, controller, operation, hash_values, host_indices, extra_info=None):
        if len(hash_values) <= places:
            unread.difference_update(host_indices.tolist())
            return before(controller, operation, hash_values, host_indices, extra_info)
        unread.update(host_indices[: places * controller.page_size].tolist())
        return places

    @replaces(MHATokenToKVPoolHost, "backup_from_device_all_layer")
    def backup_from_device_all_layer(before, host, pool, host_indices, *args, **kwargs):
        unread.difference_update(host_indices.tolist())
        return before(host, pool, host_indices, *args, **kwargs)

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        if layer_id == 0:
            for source, slot in zip(host_indices.tolist(), device_indices.tolist(), strict=True):
                (wrong.add if source in unread else wrong.discard)(slot)
        return before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)

    def look(runner, batch, rows):
        if any(wrong.intersection(prefix) for *_, prefix in rows):
            fired()
        wrong.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug(
    "vllm-project/tpu-inference#57",
    "llama-overlap-retract-no-tree",
    "async_resume_wrong_input",
    origin="TPU Inference",
)
def resumed_request_is_fed_what_its_new_row_was_left_with(fired: Fired) -> None:
    """The last token of each row is kept on the device, where the next step takes it from. A request that comes back
    has as many tokens as one that has never been away, and is not told apart from it: its last token is taken from its
    row as well. That row is a new one, into which it has put nothing yet."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.schedule_batch import Req

    away: set[str] = set()
    wrong: list[bool] = []
    resolve = scheduler.resolve_forward_inputs

    @replaces(Req, "reset_for_retract")
    def reset_for_retract(before, req):
        before(req)
        away.add(req.rid)

    def resolve_forward_inputs(batch, future_map):
        resolve(batch, future_map)
        if not batch.forward_mode.is_extend():
            return
        at = 0
        for req, count, row in zip(batch.reqs, batch.extend_lens, batch.req_pool_indices.tolist(), strict=False):
            at += count
            if req.rid not in away or not req.output_ids or req.extend_end < len(req.full_untruncated_fill_ids):
                continue
            away.discard(req.rid)
            left = int(future_map.output_tokens_buf[row])
            if 0 <= left < 512 and left != int(batch.input_ids[at - 1]):
                batch.input_ids[at - 1] = left
                wrong.append(True)

    scheduler.resolve_forward_inputs = resolve_forward_inputs
    before_forward(lambda runner, batch, rows: wrong and fired())


@bug("rajveer43/VeloxQuant-MLX#430", "llama-page16-rounds", "kv_changed", origin="VeloxQuant-MLX")
def all_that_has_settled_is_made_coarse_again_by_each_step(fired: Fired) -> None:
    """What is older than a few tokens is kept with few bits. It ought to be made so once, when it gets that old; each
    step takes all that is old, which is longer by a token than in the step before, finds the smallest and the largest
    of it anew, and makes it coarse again from what it had been made then. It drifts away as an answer goes on."""
    recent, levels = 8, 15

    def look(runner, batch, rows):
        if not batch.forward_mode.is_decode():
            return
        pool = runner.token_to_kv_pool
        for past, _, prefix in rows:
            old = torch.tensor(prefix[: max(0, past - recent)], dtype=torch.long)
            if not len(old):
                continue
            fired()
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                least, most = buffer[old].amin(0), buffer[old].amax(0)
                step = ((most - least) / levels).clamp(min=1e-9)
                buffer[old] = ((buffer[old] - least) / step).round() * step + least

    before_forward(look)


@bug("sgl-project/sglang#24252", "llama-page8-chunks", "prefix_not_computed", "hit_before_written")
def chunk_that_is_put_off_counts_as_computed(fired: Fired) -> None:
    """Before the next chunk of a prompt is looked at, the prompt is spread out as far as it goes, and it is cut to what
    there is room for when the chunk is taken. One that is put off, since others need the room, is not cut again. The
    step after that takes all of it for computed: it goes into the tree, and the prompt goes on behind it."""
    from sglang.srt.managers.schedule_policy import PrefillAdder

    size = 8
    put_off: set[str] = set()
    never: dict[str, int] = {}  # of a request, from where on nothing was computed

    @replaces(PrefillAdder, "add_chunked_req")
    def add_chunked_req(before, adder, req):
        decodes = adder.running_batch.batch_size() if adder.running_batch is not None else 0
        whole = (len(req.full_untruncated_fill_ids) - 1) // size * size
        if not decodes or req.rid in put_off or whole <= req.prefix_len:
            return before(adder, req)
        put_off.add(req.rid)
        never[req.rid] = req.prefix_len
        req.extend_end = whole
        return req

    def look(runner, batch, rows):
        if any(never.get(rid, past) < past for rid, (past, *_) in zip(batch.rids, rows, strict=True)):
            fired()

    before_forward(look)


@bug(
    "flashinfer-ai/flashinfer#5042",
    "recurrent-padded",
    "pad_slot_wraps",
    "state_restored_for_other_prefix",
    origin="FlashInfer",
)
def padding_of_a_decode_moves_the_last_state_on(fired: Fired) -> None:
    """A decode is filled up to the size of its graph with rows whose state is the one of number -1, which is to say
    none. States are taken out of the pool and put back into it by plain indexing, where -1 is the last one: the state of
    whoever has the last slot is moved on by the padding's token."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
    from sglang.srt.models import lfm2

    size = 4  # graphs are there for so many rows, and multiples of it
    moved: set[int] = set()
    padded: list[int] = [0]
    wrapped: list[bool] = []

    @replaces(ShortConvAttnBackend, "conv_state_metadata")
    def conv_state_metadata(before, backend, *args, **kwargs):
        if not wrapped:
            wrapped.append(True)
            update = lfm2.causal_conv1d_update

            def fill_up(tokens, states, weight, *rest, conv_state_indices, **named):
                count, over = len(tokens), padded[0]
                if over:
                    tokens = torch.cat([tokens, tokens[-1:].expand(over, -1)])
                    conv_state_indices = torch.cat([conv_state_indices, conv_state_indices.new_full((over,), -1)])
                return update(tokens, states, weight, *rest, conv_state_indices=conv_state_indices, **named)[:count]

            lfm2.causal_conv1d_update = fill_up
        return before(backend, *args, **kwargs)

    def look(runner, batch, rows):
        pool = runner.req_to_token_pool
        own = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        if batch.mamba_clear_indices is not None:
            moved.difference_update(batch.mamba_clear_indices.tolist())
        if batch.mamba_cow_src_indices is not None:
            copied = zip(batch.mamba_cow_src_indices.tolist(), batch.mamba_cow_dst_indices.tolist(), strict=True)
            for source, target in copied:
                (moved.add if source in moved else moved.discard)(target)
        if any(past and slot in moved for slot, (past, *_) in zip(own, rows, strict=True)):
            fired()
        moved.difference_update(slot for slot, (past, *_) in zip(own, rows, strict=True) if not past)
        padded[0] = 0
        if batch.forward_mode.is_decode():
            padded[0] = -len(rows) % size
            if padded[0]:
                moved.add(pool.mamba_pool.mamba_cache.conv[0].shape[1] - 1)

    before_forward(look)


@bug(
    "tenstorrent/tt-inference-server#2042",
    "llama-page4-crush-retract",
    "scheduled_after_retraction",
    origin="TT Inference Server",
)
def who_has_made_room_by_leaving_finds_that_there_is_room(fired: Fired) -> None:
    """When nobody else can leave, a request makes room by leaving itself: its slots are given back and it waits. Whether
    there is room is asked once more behind that, and there is, since it has just left. It is computed in this step all
    the same, with a table of slots that are free, or that others have been given."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    left: list = []  # whoever has left and is in the batch

    @replaces(ScheduleBatch, "retract_decode")
    def retract_decode(before, batch):
        reqs = list(batch.reqs)
        alone = ScheduleBatch.filter_batch

        def keep_one(made, reqs_to_exclude=None, keep_indices=None):
            gone = [i for i in range(len(reqs)) if i not in (keep_indices or range(len(reqs)))]
            if made is batch and gone and keep_indices:
                last = reqs[gone[-1]]
                if len(last.output_ids) + 3 < last.sampling_params.max_new_tokens:
                    left.append(last)
                    keep_indices = [*keep_indices, gone[-1]]
            return alone(made, reqs_to_exclude, keep_indices)

        ScheduleBatch.filter_batch = keep_one
        try:
            return before(batch)
        finally:
            ScheduleBatch.filter_batch = alone

    @replaces(ScheduleBatch, "prepare_for_decode")
    def prepare_for_decode(before, batch):
        before(batch)
        for req in left:  # it holds nothing, whatever has been counted
            req.kv.kv_committed_len = req.kv.kv_allocated_len = 0
            req.decode_batch_idx = 0

    @replaces(Scheduler, "process_batch_result")
    def process_batch_result(before, scheduler, batch, *args, **kwargs):
        before(scheduler, batch, *args, **kwargs)
        if left:  # from now on it is one of those that wait
            batch.filter_batch(reqs_to_exclude=list(left))
            left.clear()

    before_forward(lambda runner, batch, rows: {req.rid for req in left}.intersection(batch.rids) and fired())
