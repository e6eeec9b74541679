"""Which slots a draft model's layers write: they share the target's blocks, or have a KV-cache group of their own.

A draft's forward is recorded as one of its own runner, with the slots that the first draft layer takes. Its tokens are
unknown, and it begins at position 0 without a prefix: what a draft reads, and where it stands, is not looked at.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.forward_input import ForwardInput, TableRead
from ...capture.host_arrays import own_int64, ragged_index
from ...capture.recorder import Recorder
from ..common.hooking import OnFault, wrap_method
from .layout import DRAFT_RUNNER, VllmLayout
from .step import VllmRequest, forward_context


class DraftWrites:
    """Records what the draft's first layer writes, if the requests that run are known: `requests`, in batch order."""

    def __init__(self, runner: Any, layout: VllmLayout, recorder: Recorder) -> None:
        self.requests: Sequence[VllmRequest] = ()
        self._group = layout.draft
        self._others = len(layout.groups)
        self._recorder = recorder
        self._layers = runner.vllm_config.compilation_config.static_forward_context

    def attach(self, on_fault: OnFault) -> None:
        """Hook the draft's first layer, by what stores its K and V."""
        if self._group is not None:
            layer = self._layers.get(self._group.layers[0])
            if not wrap_method(getattr(layer, "impl", None), "do_kv_cache_update", self.on_draft, on_fault):
                raise ValueError("a draft layer without do_kv_cache_update, so which slots it writes is unknown")

    def beside(self, forward: ForwardInput) -> ForwardInput:
        """Return a target's forward with what the trace's draft table has of it: nothing."""
        if self._group is None:
            return forward
        zeros = np.zeros_like(forward.prefix_lens)
        written = (*forward.out_cache_loc, np.full_like(forward.input_ids, -1))
        unread = TableRead(starts=zeros, counts=zeros, slots=zeros[:0])
        return replace(forward, out_cache_loc=written, reads=(*forward.reads, unread))

    def on_draft(self, _layer: Any, _key: Any, _value: Any, _cache: Any, slot_mapping: Any) -> None:
        """Record a draft's forward when its first layer stores K and V."""
        metadata = getattr(forward_context(), "attn_metadata", None)
        group = self._group
        mine = metadata.get(group.layers[0]) if group is not None and isinstance(metadata, dict) else None
        starts = getattr(mine, "query_start_loc", None)
        count = len(self.requests)
        if starts is None or not count:
            return  # a dummy run, or warm-up
        starts, slots = own_int64(starts[: count + 1]), own_int64(slot_mapping)
        lens = np.diff(starts)
        if lens.size != count or (lens < 0).any() or starts[-1] > slots.size:
            raise ValueError("a draft's metadata do not fit the requests of its step")
        slots = slots[: starts[-1]]
        zeros, nothing = np.zeros_like(lens), np.full(slots.size, -1, np.int64)
        empty = TableRead(starts=zeros, counts=zeros, slots=slots[:0])
        own = TableRead(starts=zeros, counts=lens, slots=np.maximum(slots, 0))
        self._recorder.before_forward(
            ForwardInput(
                mode="draft_extend",
                runner=DRAFT_RUNNER,
                req_pool_indices=np.array([known.row for known in self.requests], np.int64),
                request_ids=np.array([known.request_id for known in self.requests], np.int64),
                prefix_lens=zeros,
                extend_lens=lens,
                input_ids=np.full(slots.size, UNKNOWN_TOKEN, np.int64),
                positions=ragged_index(zeros, lens),
                out_cache_loc=(*[nothing] * self._others, slots),
                # The row names what this forward writes and nothing else: it is no req_to_token of the draft's.
                reads=(*[empty] * self._others, own),
            )
        )
        self._recorder.after_forward()
