"""A thirty-third round of public bugs made anew, in mini-sglang: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("pytorch/executorch#2010", "mini-rotated", "position_off", origin="ExecuTorch")
def rotation_of_a_chunk_begins_at_zero(fired: Fired) -> None:
    """The angles for a prompt's tokens are cut from the front of the table, as many as there are tokens in the step, and not from where the step begins. A chunk behind another one, and what comes behind a prefix that was
    hit, is turned as if it stood at the beginning; its slots are the right ones."""
    from minisgl.scheduler.scheduler import Scheduler

    @replaces(Scheduler, "_prepare_batch")
    def _prepare_batch(before, scheduler, batch):
        made = before(scheduler, batch)
        if batch.is_prefill and any(req.cached_len for req in batch.reqs):
            positions, begin = batch.positions.clone(), 0
            for req in batch.reqs:
                positions[begin : begin + req.extend_len] -= req.cached_len
                begin += req.extend_len
            if (positions != batch.positions).any():
                fired()
            batch.positions = positions
        return made


@bug("golang-design/accel#10", "mini-contiguous", "attention_table_overwritten", origin="accel")
def prefill_takes_its_pages_for_contiguous(fired: Fired) -> None:
    """The attention of a prompt that goes on behind something takes a page table and does not look at it: it reads on from the first page as if the others came right behind it in memory. Wherever they do not, the tokens
    look at pages of others, or at such that nobody has."""
    import torch
    from minisgl.attention.fa import FlashAttentionBackend

    @replaces(FlashAttentionBackend, "prepare_metadata")
    def prepare_metadata(before, backend, batch):
        before(backend, batch)
        table = batch.attn_metadata.page_table
        if not batch.is_prefill:
            return
        last = len(backend.kvcache.k_cache(0)) - 1
        for row, req in enumerate(batch.reqs):
            if req.cached_len:
                pages = -(-req.device_len // backend.page_size)
                straight = (table[row, 0] + torch.arange(table.shape[1], dtype=table.dtype)).clamp(max=last)
                if (table[row, :pages] != straight[:pages]).any():
                    fired()
                table[row] = straight
