"""More public bugs made anew in SGLang 0.5.23 on the CPU, with other pages: recorded before any rule was looked at."""

from bugs import Fired, bug, replaces

from .marks import once_written_again


@bug("sgl-project/mini-sglang#142", "llama-twins", "free_too_early", "page_given_twice", "radix_insert_then_free")
def duplicates_freed_row_kept(fired: Fired) -> None:
    """Two requests compute the same prefix at once, and the second's copies are given back when it joins the tree. Its row
    goes on naming the slots that it has given back."""
    import torch
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        row, first = req.kv.req_pool_idx, req.kv.cache_protected_len
        kept = cache.req_to_token_pool.req_to_token[row, :up_to].clone()
        before(cache, req, up_to=up_to, **kwargs)
        if not req.finished():
            now = cache.req_to_token_pool.req_to_token[row, :up_to]
            lost.update(kept[first:][now[first:] != kept[first:]].tolist())
            cache.req_to_token_pool.write((row, slice(first, up_to)), kept[first:])
            free = cache.token_to_kv_pool_allocator.free_pages
            again = torch.isin(free, torch.tensor(sorted(lost)))  # what was given back is given out next
            cache.token_to_kv_pool_allocator.free_pages = torch.cat((free[again], free[~again]))


@bug("sgl-project/sglang#9068", "llama-overlap-page16", "double_free", "page_given_twice")
def last_page_freed_twice(fired: Fired) -> None:
    """A request ends in one batch while the next one, under way already, has an extra token for it. The token's page, which is
    the request's last, is given back once more."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, segments):
        segments = list(segments)
        row = cache.req_to_token_pool.req_to_token[kv.req_pool_idx].clone()
        before(cache, kv, segments)
        start, end = segments[-1]
        if end > start and not lost:
            page = int(row[end - 1]) // 16 * 16
            lost.update(range(page, page + 16))
            cache.token_to_kv_pool_allocator.free(row[end - 1 : end].long())


@bug("InternLM/lmdeploy#4917", "llama-weights", "cache_kept_over_new_weights", origin="LMDeploy")
def weights_changed_cache_kept(fired: Fired) -> None:
    """New weights are loaded while the engine runs, and the prefix cache is not emptied. A request hits K and V of the old
    weights."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    changed: list[int] = []

    @replaces(UnifiedRadixCache, "reset")
    def reset(before, cache):
        if not changed:
            before(cache)

    @replaces(WeightUpdater, "update_weights_from_tensor")
    def update_weights_from_tensor(before, updater, *args, **kwargs):
        changed.append(1)
        return before(updater, *args, **kwargs)

    from sglang.srt.managers import scheduler

    scheduler.Scheduler.flush_cache = lambda *args, **kwargs: True

    @replaces(Req, "init_next_round_input")
    def init_next_round_input(before, req, *args, **kwargs):
        done = before(req, *args, **kwargs)
        if changed and req.prefix_len:
            fired()
        return done


@bug("sgl-project/sglang#26972", "llama", "req_to_token")
def row_written_past_its_end(fired: Fired) -> None:
    """A row has no room for the slots that are reserved ahead of a decode near the longest context. What goes past its end
    lands at the head of the next request's row."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    done: list[int] = []

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode() and batch.batch_size > 1 and not done and int(batch.seq_lens.min()) > 24:
            rows = sorted(batch.req_pool_indices.tolist())
            table = runner.req_to_token_pool.req_to_token
            own = table[rows[0], int(batch.seq_lens[0]) - 4 : int(batch.seq_lens[0])].clone()
            done.append(1)
            table.view(-1)[rows[1] * table.shape[1] : rows[1] * table.shape[1] + 4] = own
            fired()
        return before(runner, batch, *args, **kwargs)


@bug("sgl-project/sglang#33547", "llama-page16-retract", "kv_changed")
def retracted_flushed_into_reused_row(fired: Fired) -> None:
    """K and V of a retracted request are written to the pool late, through its old row. The row is another request's by then,
    and so are the slots."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    waiting: list[tuple[int, int]] = []

    @replaces(ScheduleBatch, "retract_decode")
    def retract_decode(before, batch, *args, **kwargs):
        held = {req.rid: (req.kv.req_pool_idx, len(req.origin_input_ids)) for req in batch.reqs}
        done = before(batch, *args, **kwargs)
        gone = [held[req.rid] for req in done[0] if req.rid in held]
        waiting.extend(gone[:1] if not waiting else [])
        return done

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        rows = batch.req_pool_indices.tolist()
        if waiting and waiting[0][0] in rows and batch.forward_mode.is_decode() and len(waiting) == 1:
            row = waiting[0][0]
            length = int(batch.seq_lens[rows.index(row)])
            waiting.append((0, 0))
            slots = runner.req_to_token_pool.req_to_token[row, length - 6 : length - 2].long()
            for buffers in (runner.token_to_kv_pool.k_buffer, runner.token_to_kv_pool.v_buffer):
                for buffer in buffers:
                    buffer[slots] = 0.125
            fired()
        return before(runner, batch, *args, **kwargs)


@bug("sgl-project/sglang#4977", "llama-page16-retract", "page_leaked", recorded=False)
def retract_leaves_a_page(fired: Fired) -> None:
    """The end of what a retracted request gives back is rounded up to a page where it does not begin at one. A whole page is
    given back by nobody."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    inside: list[int] = []

    @replaces(ScheduleBatch, "retract_decode")
    def retract_decode(before, batch, *args, **kwargs):
        inside.append(1)
        try:
            return before(batch, *args, **kwargs)
        finally:
            inside.pop()

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, segments):
        segments = list(segments)
        if inside and segments and segments[-1][1] > segments[-1][0] and not getattr(cache, "lost", False):
            cache.lost = True
            segments.pop()
            fired()
        return before(cache, kv, segments)


@bug("kvcache-ai/sglang#75", "hybrid-page16", "swa_window_off_by_one")
def evicted_to_configured_chunk(fired: Fired) -> None:
    """The boundary up to which sliding-window slots are given back is worked out from the chunk size that was set, not from
    the chunk that runs. A page that the next forward reads is freed."""
    import sys

    from sglang.srt.mem_cache import common
    from sglang.srt.model_executor.model_runner import ModelRunner

    window = [0]

    @replaces(common, "free_swa_out_of_window_slots")
    def free_swa_out_of_window_slots(before, req, pre_len, **kwargs):
        window[0] = kwargs["sliding_window_size"]
        return before(req, pre_len + (16 if pre_len > window[0] + 16 else 0), **kwargs)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        entries = runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
        for row, end in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            first = end - 1 - window[0] if batch.forward_mode.is_decode() else end
            held = runner.req_to_token_pool.req_to_token[row, max(0, first) : end].long()
            if window[0] and bool((entries[held] == 0).any()):
                fired()
        return before(runner, batch, *args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "free_swa_out_of_window_slots", None) is not None:
            module.free_swa_out_of_window_slots = common.free_swa_out_of_window_slots
