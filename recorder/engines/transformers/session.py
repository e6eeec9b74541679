"""One batch processor's recording: what its steps and its cache events mean in the recorder's words."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ...capture.attention import paged_read
from ...capture.device_kv import as_rows
from ...capture.forward_input import AttentionInput, ForwardInput, TableRead, TruthTokens
from ...capture.host_arrays import Int64Array, own_int64, ragged_index
from ...capture.recorder import Recorder
from ...trace.header import NotWatched
from ...trace.schema import ALLOC_FRESH, ALLOC_SHARED, TIER_HOST
from .layout import GroupLayout, describe_engine
from .requests import KnownRequest, KnownRequests


class Session:
    """Records one `ContinuousBatchProcessor` into one trace.

    Methods may raise: the hooks that call them catch it, and switch the recorder off.
    """

    __slots__ = ("_forward", "_layouts", "_requests", "_streams", "_submitted", "_tokens", "reason", "recorder")

    def __init__(
        self,
        path: Path,
        processor: Any,
        *,
        layers: tuple[int, ...] | None,
        capture_bytes: int,
        kv_watch_every: int,
        submitted: bool,
        writer_options: dict[str, Any],
    ) -> None:
        if processor.use_async_batching:
            raise ValueError(
                "asynchronous batching cannot be recorded: its steps overlap; pass "
                "ContinuousBatchingConfig(use_async_batching=False)"
            )
        header, self._layouts, sources = describe_engine(processor, layers=layers, capture_bytes=capture_bytes)
        if sources and not submitted:
            off = NotWatched(what="submitted", name=header.runners[0].name, reason="switched off: submitted=False")
            header = dataclasses.replace(header, not_watched=(*header.not_watched, off))
        self._requests = KnownRequests(num_rows=header.tables[0].rows, num_groups=len(self._layouts))
        self._forward = -1
        self._tokens = 0
        self._submitted: dict[tuple[int, int], Any] = {}
        self._streams: dict[tuple[int, str], tuple[int, int]] = {
            (stream.layer, stream.half): (group, number)
            for group, pool in enumerate(header.groups if submitted else ())
            for number, stream in enumerate(pool.streams)
        }
        self.reason = "finish"
        self.recorder = Recorder(path, header, kv_sources=sources, kv_watch_every=kv_watch_every, **writer_options)
        if self._has_history(processor):
            self.recorder.lost("attached to an engine that had already run")

    def _has_history(self, processor: Any) -> bool:
        """Say whether the cache holds something that this trace did not see being written."""
        batch = processor.inputs_and_outputs.requests_in_batch
        started = any(future.state.position_offset != future.query_length for future in batch)
        known = {future.state.request_id for future in batch}
        return started or any(
            layout.allocator.ledger.block_to_hash or set(layout.allocator.block_table) - known
            for layout in self._layouts
        )

    def before_step(self, processor: Any) -> None:
        """Tell of the forward that `_generation_step` is about to run."""
        io = processor.inputs_and_outputs
        batch = io.requests_in_batch
        self._forward += 1
        requests = [self._known(future.state) for future in batch]
        rows = np.array([self._requests.run(request, self._forward) for request in requests], np.int64)
        for layout in self._layouts:
            self._tell_new_blocks(layout, requests)
        extend = np.array([future.query_length for future in batch], np.int64)
        # The engine has counted this step in already.
        prefix = np.array([future.state.position_offset for future in batch], np.int64) - extend
        truth = [
            request.truth(future.state.initial_tokens, future.state.generated_tokens)
            for request, future in zip(requests, batch, strict=True)
        ]
        prompt_lens = np.array([len(future.state.initial_tokens) for future in batch], np.int64)
        self._submitted.clear()
        self._tokens = tokens = int(io.total_seqlen_q)
        self.recorder.before_forward(
            ForwardInput(
                mode=_mode(extend, prefix, prompt_lens),
                req_pool_indices=rows,
                request_ids=np.array([request.request_id for request in requests], np.int64),
                prefix_lens=prefix,
                extend_lens=extend,
                input_ids=io.input_ids[:tokens],
                positions=io.position_ids[:tokens],
                out_cache_loc=tuple(self._written(layout, io, prefix, extend) for layout in self._layouts),
                reads=tuple(self._read(layout, io, prefix, extend) for layout in self._layouts),
                truth=TruthTokens(flat=np.concatenate(truth), lens=np.array([part.size for part in truth])),
                attention=self._attention(io, prefix, extend),
            )
        )

    def after_step(self, processor: Any, error: BaseException | None) -> None:
        """Complete the forward with the tokens that it sampled, or with what the model raised."""
        submitted = {key: as_rows(states)[: self._tokens] for key, states in self._submitted.items()}
        self._submitted.clear()
        if error is not None:
            self.recorder.after_forward(note=f"the model raised {self.recorder.error_text(error)}")
            return
        io = processor.inputs_and_outputs
        sampled_lens = np.array([int(future.has_new_token) for future in io.requests_in_batch], np.int64)
        sampled = io.output_ids[0, : int(sampled_lens.sum())]
        self.recorder.after_forward(sampled_tokens=sampled, sampled_lens=sampled_lens, submitted=submitted)

    def submits(self, cache: Any, keys: Any, values: Any, layer: int) -> None:
        """Keep what a layer hands to the cache, `[1, heads, T, head_dim]`, until the forward has ended.

        A view would do if nobody wrote into it; what damages the pool may well do that, so the bytes are copied.
        """
        for half, states in (("K", keys), ("V", values)):
            key = self._streams.get((layer, half))
            if key is not None and states.dtype == cache.dtype:
                self._submitted[key] = states[0].transpose(0, 1).detach().clone()

    def _known(self, state: Any) -> KnownRequest:
        request = self._requests.get(state.request_id)
        return request if request is not None else self._admit(state.request_id, len(state.initial_tokens))

    def _admit(self, name: str, prompt_len: int, parent: KnownRequest | None = None) -> KnownRequest:
        request = self._requests.admit(name)
        labels = {"parent": parent.request_id} if parent is not None else None
        self.recorder.request(request_id=request.request_id, name=name, prompt_len=prompt_len, labels=labels)
        return request

    def _tell_new_blocks(self, layout: GroupLayout, requests: list[KnownRequest]) -> None:
        """Tell of blocks that were added to the requests' tables since they were last seen."""
        for request in requests:
            table = layout.allocator.block_table.get(request.name, [])
            if len(table) > request.blocks[layout.index]:
                fresh = table[request.blocks[layout.index] :]
                request.blocks[layout.index] = len(table)
                # A block with a hash was written before: the prefix cache lent it out.
                shared = [block for block in fresh if block in layout.allocator.ledger.block_to_hash]
                self._tell_blocks("alloc", layout, [block for block in fresh if block not in shared], request, "")
                self._tell_blocks("alloc", layout, shared, request, "prefix hit", status=ALLOC_SHARED)

    def _tell_blocks(
        self,
        kind: str,
        layout: GroupLayout,
        blocks: list[int],
        request: KnownRequest | None,
        note: str,
        *,
        status: str = ALLOC_FRESH,
    ) -> None:
        if blocks:
            self.recorder.slots(
                kind,
                group=layout.index,
                runs=layout.block_slots(blocks),
                request_id=request.request_id if request is not None else -1,
                row=request.row if request is not None and request.row else -1,
                note=note,
                status=status,
            )

    def _written(self, layout: GroupLayout, io: Any, prefix: Int64Array, extend: Int64Array) -> Int64Array:
        """Return the slot of each token of the step, `[T]`."""
        if io.use_block_table:
            return layout.rows_to_slots(_allocator_rows(layout.allocator.get_write_indices, io, prefix, extend))
        return layout.rows_to_slots(
            own_int64(io.write_index_storage[layout.index, : io.true_write_sizes[layout.index]])
        )

    def _read(self, layout: GroupLayout, io: Any, prefix: Int64Array, extend: Int64Array) -> TableRead:
        """Return the slots of the cached tokens that the step reads.

        They are the block table's; of a ring, whose table says less than that, what the step will index the pool with.
        """
        if not layout.ring_size and not io.use_block_table:
            return paged_read(self._blocks(layout, io), layout.page_size, prefix)
        if io.use_block_table:
            read = _allocator_rows(layout.allocator.get_read_indices, io, prefix, extend)
            lens = np.array(
                [layout.allocator.get_seqlen_k(p, e) for p, e in zip(prefix, extend, strict=True)], np.int64
            )
            ends = np.cumsum(lens)
        else:
            read = own_int64(io.read_index_storage[layout.index, : io.true_read_sizes[layout.index]])
            ends = own_int64(io.cumulative_seqlens_k[layout.allocator.layer_type][1 : prefix.size + 1])
        if not read.size or (not io.max_kv_read and not io.use_block_table):
            nothing = np.zeros_like(prefix)
            return TableRead(starts=nothing, counts=nothing, slots=read[:0])
        starts = ends - np.diff(ends, prepend=0)
        counts = np.clip(ends - starts - extend, 0, prefix)
        slots = layout.rows_to_slots(read[ragged_index(starts, counts)])
        first = prefix - counts
        if layout.ring_size:
            slots, first, counts = self._with_predecessors(layout, io, slots, first, counts)
        return TableRead(starts=first, counts=counts, slots=slots)

    def _blocks(self, layout: GroupLayout, io: Any) -> Int64Array:
        """Return the block table of the step's requests, `[bs, blocks of the longest]`, -1 for none."""
        tables = [layout.allocator.block_table.get(future.state.request_id, ()) for future in io.requests_in_batch]
        found = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int64)
        for row, table in zip(found, tables, strict=True):
            row[: len(table)] = table
        return found

    def _attention(self, io: Any, prefix: Int64Array, extend: Int64Array) -> AttentionInput | None:
        """Return what the attention of the step gets: its `cu_seq_lens_q`, `cu_seq_lens_k` and `read_index`.

        Layers with a sliding window get the window's length; what it is off by is what the request's is off by. What
        they read comes from the ring in `_read` and cannot be held against anything else. Of the decode fast path,
        whose kernel has the block table alone, nothing is said.
        """
        if io.use_block_table:
            return None
        bs = prefix.size
        seq_lens = end = prefix + extend
        slots: list[TableRead | None] = []
        for layout in self._layouts:
            bounds = own_int64(io.cumulative_seqlens_k[layout.allocator.layer_type][: bs + 1])
            got = np.diff(bounds)
            own = [layout.allocator.get_seqlen_k(p, e) for p, e in zip(prefix.tolist(), extend.tolist(), strict=True)]
            seq_lens = np.where(seq_lens == end, end + got - np.array(own, np.int64), seq_lens)
            if layout.ring_size:
                slots.append(None)
                continue
            size = (
                int(io.true_read_sizes[layout.index]) if io.max_kv_read else 0
            )  # else all of it is in the step itself
            read = own_int64(io.read_index_storage[layout.index, :size])
            counts = np.clip(size - bounds[:-1], 0, np.maximum(got, 0))
            rows = read[ragged_index(np.minimum(bounds[:-1], size), counts)]
            slots.append(TableRead(starts=np.zeros_like(counts), counts=counts, slots=layout.rows_to_slots(rows)))
        query_lens = np.diff(own_int64(io.cumulative_seqlens_q[: bs + 1]))
        return AttentionInput(seq_lens=np.maximum(seq_lens, 0), query_lens=query_lens, slots=tuple(slots))

    def _with_predecessors(
        self, layout: GroupLayout, io: Any, slots: Int64Array, first: Int64Array, counts: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Put the slot of the position before each window in front of it: the next link of the chain.

        The engine does not read it, but it is still in the ring, where this step's first token goes.
        """
        sliding = np.flatnonzero(first > 0)
        tables = layout.allocator.block_table
        before = [
            layout.ring_slot(tables.get(io.requests_in_batch[r].state.request_id, []), int(first[r]) - 1)
            for r in sliding
        ]
        offsets = (np.cumsum(counts) - counts)[sliding]
        first, counts = first.copy(), counts.copy()
        first[sliding] -= 1
        counts[sliding] += 1
        return np.insert(slots, offsets, np.array(before, np.int64)), first, counts

    def free_blocks(self, allocator: Any, name: str, *, no_cache: bool) -> None:
        """Tell of the blocks that go back to the pool when a request's table is dropped; called before that."""
        request = self._requests.get(name)
        if request is None:
            return
        layout = self._layouts[allocator.index]
        ledger = allocator.ledger
        freed = [
            block
            for block in allocator.block_table.get(name, [])
            if ledger.shared_ref_counts.get(block, 1) == 1 and (no_cache or block not in ledger.block_to_hash)
        ]
        self._tell_blocks("free", layout, freed, request, self.reason)
        request.blocks[layout.index] = 0
        if self.reason != "offload" and layout is self._layouts[-1]:
            self._requests.retire(name)

    def replaced_blocks(self, allocator: Any, name: str, before: list[int], sole: list[bool]) -> None:
        """Tell of the blocks that de-duplication took out of a request's table.

        `before` is the table as it was, `sole[i]` whether its block i had no other user.
        """
        after = allocator.block_table.get(name, [])
        freed = [old for old, new, only in zip(before, after, sole, strict=False) if old != new and only]
        self._tell_blocks("free", self._layouts[allocator.index], freed, self._requests.get(name), "dedup")

    def evicted_blocks(self, cached: list[list[int]]) -> None:
        """Tell of cached blocks, `cached[g]` for each group, that the pool took back."""
        for layout, blocks in zip(self._layouts, cached, strict=True):
            self._tell_blocks("evict", layout, blocks, None, "cache pressure")

    def forked(self, parent: Any, children: list[str]) -> None:
        """Tell of requests that begin as copies of another one."""
        source = self._known(parent)
        for name in children:
            child = self._admit(name, len(parent.initial_tokens), source)
            for layout in self._layouts:
                table = layout.allocator.block_table.get(name, [])
                shared = set(layout.allocator.block_table.get(parent.request_id, []))
                child.blocks[layout.index] = len(table)
                self._tell_blocks("alloc", layout, [b for b in table if b not in shared], child, "fork")
                self._tell_blocks(
                    "alloc", layout, [b for b in table if b in shared], child, "shared by fork", status=ALLOC_SHARED
                )

    def copied_blocks(self, copies: dict[str, tuple[list[int], list[int]]]) -> None:
        """Tell of blocks copied inside the pool."""
        for layout, (src, dst) in zip(self._layouts, copies.values(), strict=True):
            if src:
                starts, counts = layout.block_slots(src)
                self.recorder.kv_copy(
                    group=layout.index, src=starts, dst=layout.block_slots(dst)[0], count=counts, note="fork"
                )

    def offloaded(self, name: str, pool_blocks: dict[str, list[int]], host_blocks: dict[str, list[int]]) -> None:
        """Tell of a request's blocks copied to the host."""
        self._tell_offload(name, pool_blocks, host_blocks, "offload", to_host=True)

    def restored(self, name: str, pool_blocks: dict[str, list[int]], host_blocks: dict[str, list[int]]) -> None:
        """Tell of a request's blocks copied back from the host."""
        self._tell_offload(name, pool_blocks, host_blocks, "load-back", to_host=False)

    def _tell_offload(
        self,
        name: str,
        pool_blocks: dict[str, list[int]],
        host_blocks: dict[str, list[int]],
        note: str,
        *,
        to_host: bool,
    ) -> None:
        request = self._requests.get(name)
        for layout, group in zip(self._layouts, pool_blocks, strict=True):
            count = min(len(pool_blocks[group]), len(host_blocks.get(group, [])))
            if not count:
                continue
            pool, counts = layout.block_slots(pool_blocks[group][:count])
            host, _ = layout.block_slots(host_blocks[group][:count])
            self.recorder.kv_copy(
                group=layout.index,
                src=pool if to_host else host,
                dst=host if to_host else pool,
                count=counts,
                src_tier=1 - TIER_HOST if to_host else TIER_HOST,
                dst_tier=TIER_HOST if to_host else 1 - TIER_HOST,
                request_id=request.request_id if request is not None else -1,
                note=note,
            )


def _mode(extend: Int64Array, prefix: Int64Array, prompt_lens: Int64Array) -> str:
    decoding = (extend == 1) & (prefix >= prompt_lens)
    if decoding.all():
        return "decode" if decoding.size else "idle"
    return "mixed" if decoding.any() else "extend"


def _allocator_rows(indices_of: Any, io: Any, prefix: Int64Array, extend: Int64Array) -> Int64Array:
    """Return the physical rows of a step on the decode fast path, whose kernel walks the block table itself.

    That path needs a GPU with flash attention; untested.
    """
    rows: list[int] = []
    for future, past, query in zip(io.requests_in_batch, prefix, extend, strict=True):
        rows.extend(indices_of(future.state.request_id, int(past), int(query)))
    return np.array(rows, np.int64)
