"""One batch processor's recording: what its steps and its cache events mean in the recorder's words."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...capture.forward_input import AttentionInput, ForwardInput, TableRead
from ...capture.host_arrays import as_rows, on_host, own_int64
from ...capture.privacy import IdentityValue
from ...process.injection import Injection
from ...trace.header import NotWatched, TraceHeader
from ...trace.schema import ALLOC_FRESH, ALLOC_SHARED, AllocStatus, SlotChange
from ..common.hooking import Around, Finish, around, beside
from ..common.injecting import Injector, Undo, injector_of, put_entry, recorder_class, undone
from ..common.oracle import OracleSampler, force, with_oracle
from ..common.requests import KnownRequest, RequestRows, logprobs_or_none, mode_by_lens, truth_tokens
from .host_copies import HostCopies
from .layout import (
    TransformersGroup,
    attention_lens,
    describe_engine,
    indexed_read,
    rows_read,
    step_tensors,
    table_read,
    written_slots,
)
from .masks import Masks
from .outputs import OutputCalls
from .returned import ReturnedRows
from .weights import Weights


class TransformersRequest(KnownRequest):
    """A request; `blocks[g]` are the blocks of group g's table that alloc events have named."""

    def __init__(self, name: str, request_id: int) -> None:
        super().__init__(name, request_id)
        self.blocks: defaultdict[int, list[int]] = defaultdict(list)
        self.seed = request_id  # for the oracle; a fork goes by its parent's, whose first token it has
        self.said: dict[str, Any] = {}  # of it, beside its names


class TransformersRecording:
    """Records one `ContinuousBatchProcessor` into one trace; `on_*` are hooks, see `TransformersAttachment.install`.

    Methods may raise: the hooks around them catch it, and switch the recorder off.
    """

    def __init__(
        self,
        path: Path,
        processor: Any,
        *,
        layers: tuple[int, ...] | None,
        capture_bytes: int,
        kv_watch_every: int,
        outputs_every: int,
        submitted: bool,
        oracle: str,
        inject: Injection | None,
        seed: int | None,
        writer_options: dict[str, Any],
        begins: Callable[..., TraceHeader] | None = None,
    ) -> None:
        if processor.use_async_batching and (oracle or inject):
            raise ValueError(
                "neither an oracle samples nor are faults put in where steps overlap; pass "
                "ContinuousBatchingConfig(use_async_batching=False)"
            )
        header, self._layouts, sources = describe_engine(
            processor, layers=layers, capture_bytes=capture_bytes, seed=seed
        )
        if sources and not submitted:
            off = NotWatched(what="submitted", name=header.runners[0].name, reason="switched off: submitted=False")
            header = dataclasses.replace(header, not_watched=(*header.not_watched, off))
        if oracle:
            header = with_oracle(header, oracle, int(processor.config.vocab_size))
        late = self._has_history(processor)
        header = begins(header, late=late) if begins is not None else header
        numbers = itertools.count()  # a name may come again, as another request
        self._requests = RequestRows(header.tables[0].rows, lambda name: TransformersRequest(name, next(numbers)))
        self.in_step = False
        self.window = 0  # in which it began
        self._forward = -1
        self._tokens = 0
        self._io: Any = None  # what the step gets
        self._waiting: list[
            TransformersRequest
        ] = []  # of a step that overlaps with the one before, until it is computed
        self._submitted: dict[tuple[int, int], Any] = {}
        self._weights = Weights()
        self._streams: dict[tuple[int, str], tuple[int, int]] = {
            (stream.layer, stream.half): (group, number)
            for group, pool in enumerate(header.groups if submitted else ())
            for number, stream in enumerate(pool.streams)
            if not stream.samples
        }
        self._sampled: dict[tuple[int, str], tuple[int, int]] = {
            (layer, stream.half): (group, number)
            for group, pool in enumerate(header.groups if submitted else ())
            for number, stream in enumerate(pool.streams)
            for layer in (stream.layers if stream.samples else ())
        }
        looks = submitted and not processor.use_async_batching
        self._returned = ReturnedRows(self._layouts if looks else (), header, sources)
        self._masks = Masks(self._layouts)
        self._outputs = OutputCalls(self._masks.keys_of, outputs_every if looks else 0)
        self._lens = AttentionInput()  # of the step, by its `cu_seq_lens`
        self._indexed: tuple[TableRead | None, ...] = ()  # of each group, what the step's indices have attention read
        self._reason = "finish"  # of blocks that are freed now
        begin = recorder_class(inject)
        self.recorder = begin(path, header, kv_sources=sources, kv_watch_every=kv_watch_every, **writer_options)
        self._injector = injector_of(self.recorder, inject)
        self._put_back: Callable[[], None] | None = None
        self._copies = HostCopies(self.recorder, self._layouts, self._request_id)
        if header.sampler is not None:
            self._sampler = OracleSampler(header.sampler)
            self._sampler.injector = self._injector
            logits = processor.logit_processor
            logits.logits_processor.append(lambda _, scores: self._force(processor.inputs_and_outputs, scores))
            logits.do_processing = True
        if late and begins is not None:
            self.recorder.begins_late()
        elif late:
            self.recorder.lost("attached to an engine that had already run")

    def _has_history(self, processor: Any) -> bool:
        """Say whether the cache holds something that this trace did not see being written."""
        batch = step_tensors(processor).requests_in_batch
        started = any(future.state.position_offset != future.query_length for future in batch)
        known = {future.state.request_id for future in batch}
        allocators = [layout.allocator for layout in self._layouts]
        return started or any(one.ledger.block_to_hash or set(one.block_table) - known for one in allocators)

    def _force(self, io: Any, scores: Any) -> Any:
        """Leave each request that gets a token in this step, `scores` `[requests, vocab]`, the oracle's."""
        if self.recorder.off:
            return scores
        sampled = [future for future in io.requests_in_batch if future.has_new_token]
        seeds = [self._known(future.state).seed for future in sampled]
        names = [future.state.request_id for future in sampled]
        return force(scores, self._sampler.sample(names, seeds, [future.state.position_offset for future in sampled]))

    def before_step(self, processor: Any, model: Any) -> None:
        """Record the forward that `_generation_step` is about to run; if steps overlap, as far as the host knows it."""
        if self._weights.look(model):
            for request in self._requests.live():
                self._say(request)
        io = self._io = step_tensors(processor)
        self._forward += 1
        requests = [self._known(future.state) for future in io.requests_in_batch]
        for request in requests:
            self._requests.run(request, self._forward)
        for layout in self._layouts:
            self._record_new_blocks(layout, requests)
        self._copies.flush()
        if processor.use_async_batching:
            self._waiting = requests
            return
        ids = [request.request_id for request in requests]
        with undone(None if self._injector is None else redirect(self._injector, self._layouts, io, ids)) as put_back:
            self._begin_forward(io, requests)
        self._put_back = put_back

    def on_compute(self, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Record what a step that overlaps with the one before is about to compute, once that and the copy of its inputs are over."""
        if self._waiting:
            runner.inputs_and_outputs.compute_stream.synchronize()
            requests, self._waiting = self._waiting, []
            self._begin_forward(self._io, requests)

    def _begin_forward(self, io: Any, requests: list[TransformersRequest]) -> None:
        batch = io.requests_in_batch
        extend = np.array([future.query_length for future in batch], np.int64)
        # The engine has counted this step in already.
        prefix = np.array([future.state.position_offset for future in batch], np.int64) - extend
        truth = [
            request.tokens.follow(future.state.initial_tokens, future.state.generated_tokens)
            for request, future in zip(requests, batch, strict=True)
        ]
        prompt_lens = np.array([len(future.state.initial_tokens) for future in batch], np.int64)
        self._submitted.clear()
        self._tokens = tokens = int(io.total_seqlen_q)
        written = tuple(written_slots(layout, io, prefix.size) for layout in self._layouts)
        rows = [
            rows_read(layout, io, prefix, extend, slots) for layout, slots in zip(self._layouts, written, strict=True)
        ]
        self._indexed = tuple(
            indexed_read(layout, io, its, prefix.size) for layout, its in zip(self._layouts, rows, strict=True)
        )
        self._returned.begin(rows, written)
        self._masks.begin(io, prefix, extend)
        self._outputs.take()
        self._lens = attention_lens(self._layouts, io, prefix, extend)
        self.recorder.before_forward(
            ForwardInput(
                mode=mode_by_lens(extend, prefix, prompt_lens),
                req_pool_indices=np.array([request.row for request in requests], np.int64),
                request_ids=np.array([request.request_id for request in requests], np.int64),
                prefix_lens=prefix,
                extend_lens=extend,
                input_ids=io.input_ids[:tokens],
                positions=io.position_ids[:tokens],
                out_cache_loc=written,
                reads=tuple(table_read(layout, io, prefix, extend) for layout in self._layouts),
                truth=truth_tokens(truth),
                attention=self._lens,
            )
        )

    def after_step(self, processor: Any, error: BaseException | None) -> None:
        """Complete the forward with the tokens that it sampled, or with what the model raised."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        if self._waiting:  # it has not come to the model
            self._waiting = []
            return
        io = self._io
        if processor.use_async_batching:
            processor.inputs_and_outputs.compute_stream.synchronize()
            self.recorder.fed(io.input_ids[: self._tokens])
        submitted: dict[tuple[int, int], Any] = {
            key: {layer: as_rows(rows)[: self._tokens] for layer, rows in states.items()}
            if isinstance(states, dict)
            else as_rows(states)[: self._tokens]
            for key, states in self._submitted.items()
        }
        self._submitted.clear()
        slots = tuple(self._returned.seen(group, indexed) for group, indexed in enumerate(self._indexed))
        outputs, compared = self._outputs.take()
        seen = AttentionInput(slots=slots, token_counts=self._masks.counts, outputs=outputs, outputs_compared=compared)
        if self._masks.off.any():  # a token sees other keys than its request has for it, beside those before a window
            lens = np.maximum(own_int64(self._lens.seq_lens) + self._masks.off, 0)
            seen = dataclasses.replace(seen, seq_lens=lens, query_lens=self._lens.query_lens)
        self.recorder.attention(seen)
        if error is not None:
            self.recorder.after_forward(note=f"the model raised {self.recorder.error_text(error)}", failed=True)
            self._copies.after_forward()
            return
        sampled_lens = np.array([int(future.has_new_token) for future in io.requests_in_batch], np.int64)
        sampled = io.output_ids[0, : int(sampled_lens.sum())]
        said: dict[str, Any] = {"sampled_tokens": sampled, "sampled_lens": sampled_lens, "submitted": submitted}
        if getattr(processor, "return_logprobs", False):
            said |= logprobs_or_none(
                lambda: {
                    "sampled_logprobs": on_host(io.output_ids[1, : sampled.shape[0]], wait=True).view(np.float32),
                    "logprobs_kind": "processed" if processor.logit_processor.do_processing else "raw",
                }
            )
        self.recorder.after_forward(**said)
        self._copies.after_forward()

    def on_update(
        self, cache: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any = None, **_: Any
    ) -> Finish | None:
        """Keep what a layer hands to the cache, `[1, heads, T, head_dim]`, until the forward has ended; see what it gets back.

        A view would do if nobody wrote into it; what damages the pool may well do that, so the bytes are copied.
        5.18 passes its indices by their names, and does not call this for a block table.
        """
        if kwargs is not None and kwargs.get("block_table") is not None:  # attention itself stores K and V
            return None
        if is_captured(key_states):  # nothing runs yet: what the step has handed in came before
            return None
        for half, states in (("K", key_states), ("V", value_states)):
            key, sampled = self._streams.get((layer_idx, half)), self._sampled.get((layer_idx, half))
            if (key is None and sampled is None) or states.dtype != cache.dtype:
                continue
            rows = states[0].transpose(0, 1).detach().clone()
            if key is not None:
                self._submitted[key] = rows
            if sampled is not None:
                self._submitted.setdefault(sampled, {})[layer_idx] = rows
        look = self._returned.on_update(layer_idx, (key_states, value_states))
        if self._masks.keys_of(layer_idx) is None:  # nobody looks at what comes out of it
            return look

        def finish(result: Any, error: BaseException | None) -> None:
            if error is None:
                self._outputs.on_given(layer_idx, result)
            if look is not None:
                look(result, error)

        return finish

    def on_attention(
        self, kind: str, module: Any, query: Any, _key: Any, _value: Any, attention_mask: Any, *_: Any, **kwargs: Any
    ) -> Finish | None:
        """See what a layer's attention is let look at in the step that runs, and what it gives."""
        if not self.in_step:
            return None
        self._masks.on_attention(kind, module, attention_mask, kwargs.get("is_causal"))
        return self._outputs.on_attention(module, query, kwargs)

    def _known(self, state: Any, parent: TransformersRequest | None = None, name: str = "") -> TransformersRequest:
        request, new = self._requests.see(name or state.request_id)
        if new:
            labels = {"parent": parent.request_id} if parent is not None else None
            request.said = {"prompt_len": len(state.initial_tokens), "labels": labels}
            if parent is not None and self.recorder.header.sampler is not None:
                request.said["room"] = request.seed = parent.seed
            self._say(request)
        return request

    def _say(self, request: TransformersRequest) -> None:
        """Record a request, with what it is computed with from now on; continuous batching has neither salts nor media."""
        identity = [
            IdentityValue("weights", str(self._weights.changes)),
            IdentityValue("salt", ""),
            IdentityValue("media", ""),
        ]
        if not self._weights.adapters:
            identity.append(IdentityValue("adapter", ""))
        self.recorder.request(request_id=request.request_id, name=request.name, identity=identity, **request.said)

    def _request_id(self, name: str) -> int:
        request = self._requests.get(name)
        return -1 if request is None else request.request_id

    def _record_new_blocks(self, layout: TransformersGroup, requests: list[TransformersRequest]) -> None:
        """Record the blocks that came into the requests' tables since they were last seen, behind others or in their place."""
        for request in requests:
            table, known = layout.table(request.name), request.blocks[layout.index]
            if table != known:
                fresh = [block for place, block in enumerate(table) if known[place : place + 1] != [block]]
                request.blocks[layout.index] = list(table)
                # A block with a hash was written before: the prefix cache lent it out.
                self._allocated(layout, fresh, layout.allocator.ledger.block_to_hash, request, "", "prefix hit")

    def _allocated(
        self, layout: TransformersGroup, blocks: Any, lent: Any, request: TransformersRequest, *notes: str
    ) -> None:
        """Record a request's blocks: its own, and those that are `lent` to it; a note for each."""
        for shared, note in enumerate(notes):
            mine = [block for block in blocks if (block in lent) == bool(shared)]
            self._slots("alloc", layout, mine, request, note, status=ALLOC_SHARED if shared else ALLOC_FRESH)

    def _slots(
        self,
        kind: SlotChange,
        layout: TransformersGroup,
        blocks: list[int],
        request: TransformersRequest | None,
        note: str,
        *,
        status: AllocStatus = ALLOC_FRESH,
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

    @beside
    def because(self, reason: str) -> Around:
        """Give blocks that are freed until the engine's function returns another reason."""
        self._reason, before = reason, self._reason
        try:
            yield
        finally:
            self._reason = before

    def on_free(self, allocator: Any, request_id: str, no_cache: bool = False) -> None:
        """Record the blocks that go back to the pool when a request's table is dropped."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._copies.freed(request_id)
        layout, ledger = self._layouts[allocator.index], allocator.ledger
        freed = [
            block
            for block in layout.table(request_id)
            if ledger.shared_ref_counts.get(block, 1) == 1 and (no_cache or block not in ledger.block_to_hash)
        ]
        self._slots("free", layout, freed, request, self._reason)
        request.blocks[layout.index] = []
        if self._reason != "offload" and layout is self._layouts[-1]:
            self._requests.drop(request)

    @around
    def on_complete(self, allocator: Any, request_id: str, *_args: Any, **_kwargs: Any) -> Around:
        """Record the blocks that de-duplication takes out of a request's table."""
        layout, users = self._layouts[allocator.index], allocator.ledger.shared_ref_counts
        before = [(block, users.get(block, 1) == 1) for block in layout.table(request_id)]
        yield
        table, request = layout.table(request_id), self._requests.get(request_id)
        freed = [old for (old, only), new in zip(before, table, strict=False) if old != new and only]
        self._slots("free", layout, freed, request, "dedup")
        known = [] if request is None else request.blocks[layout.index]
        known[:] = [new if old != new else had for had, (old, _), new in zip(known, before, table, strict=False)]

    @around
    def on_evict(self, cache: Any) -> Around:
        """Record the cached blocks that the pool takes back."""
        cached = [list(allocator.ledger.cached_blocks) for allocator in cache.cache_allocators.values()]
        yield
        for layout, blocks in zip(self._layouts, cached, strict=True):
            self._slots("evict", layout, blocks, None, "cache pressure")

    @around
    def on_fork(self, _cache: Any, parent: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record the requests that begin as copies of another one."""
        children = yield
        source = self._known(parent)
        for name in children or ():
            child = self._known(parent, source, name)
            for layout in self._layouts:
                table = layout.table(name)
                child.blocks[layout.index] = list(table)
                self._allocated(layout, table, layout.table(parent.request_id), child, "fork", "shared by fork")

    @around
    def on_copy(self, _cache: Any, copies: dict[str, tuple[list[int], list[int]]]) -> Around:
        """Record the blocks that are copied inside the pool: of each group `(source blocks, destination blocks)`."""
        yield
        for layout, (src, dst) in zip(self._layouts, copies.values(), strict=True):
            if src:
                (starts, count), (to, _) = layout.block_slots(src), layout.block_slots(dst)
                self.recorder.kv_copy(group=layout.index, src=starts, dst=to, count=count, note="fork")

    @around
    def on_offload(self, manager: Any, victims: list[Any], tables: dict[str, dict[str, list[int]]]) -> Around:
        """Record the blocks that go to the host."""
        names = yield
        gone = [state.request_id for state in victims if names and state.request_id in names]
        self._copies.stored(manager, {name: tables[name] for name in gone})

    @around
    def on_restore(self, manager: Any, requests_in_batch: list[Any]) -> Around:
        """Take note of the blocks that come back from the host."""
        coming = [future.state.request_id for future in requests_in_batch if future.state.is_cpu_offloaded]
        loads = [load for name in coming for load in self._copies.loads(manager, name)]
        yield
        self._copies.loaded(loads)


def is_captured(tensor: Any) -> bool:
    """Say whether what is done with a tensor now is put into a CUDA graph, and not run."""
    import torch

    return bool(tensor.is_cuda) and torch.cuda.is_current_stream_capturing()


def redirect(
    injector: Injector, layouts: Sequence[TransformersGroup], io: Any, request_ids: Sequence[int]
) -> Undo | None:
    """Let a page be another one for a step, in its request's table and in what attention reads, if it is time; return what puts
    the table back, None if nothing was done.
    """
    if not injector.redirects():
        return None
    layout = next((layout for layout in layouts if not layout.ring_size), None)
    if layout is None or io.use_block_table or not io.max_kv_read:
        return None
    page, batch = layout.page_size, io.requests_in_batch
    names = [future.state.request_id for future in batch]
    whole = [(future.state.position_offset - future.query_length) // page for future in batch]
    tables = [layout.table(name) for name in names]
    found = zip(tables, whole, strict=True)
    cells = [(r, column, table[column]) for r, (table, count) in enumerate(found) for column in range(count)]
    begins = own_int64(io.cumulative_seqlens_k[layout.name][: len(batch) + 1])

    def point(r: int, column: int, block: int) -> Undo:
        import torch

        begin = int(begins[r]) + column * page
        rows = torch.from_numpy(block * layout.stride + np.arange(page))
        io.read_index_storage[layout.index, begin : begin + page].copy_(rows)
        return put_entry(tables[r], column, block)

    return injector.redirect(names, request_ids, cells, page, point, layout.index)
