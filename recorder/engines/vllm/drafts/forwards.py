"""A draft model's forwards: its layers share the target's blocks, or have a KV-cache group of their own.

Of vLLM's EAGLE, EAGLE3, MTP and draft models that the V1 runner runs, each forward is recorded as one of a runner of its
own, as its model is called: a first one over the target's tokens, rejected ones among them, then one for each further
token that is drafted. Of others only the slots that the first draft layer takes are: their tokens are unknown, and they
begin at position 0 without a prefix, so that what such a draft reads, and where it stands, is not looked at.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .....kernels.arrays import Int64Array
from .....kernels.constants import UNKNOWN_TOKEN
from ....capture.attention import paged_read
from ....capture.device.forward import TokenSource
from ....capture.device.recorder import DeviceRecorder
from ....capture.forward_input import AttentionInput, ForwardInput, TableRead
from ....capture.host_arrays import own_int64, ragged_index
from ....capture.recorder import Recorder
from ....trace.schema import RECEIVE
from ...common.hooking import Finish, OnFault, wrap_method
from ..attention.given import FIELDS, PLAIN_BACKENDS, chosen_attention, chosen_reads, same_attention
from ..connectors.pairs import transfers_of
from ..layout import DRAFT_RUNNER, VllmGroup, VllmLayout
from ..step import Step, StepForward, VllmRequest, VllmRequests, forward_context, table_read
from ..submitted import of_tokens

NOT_RUN = "the drafter did not run over these tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCall:
    """What a draft's model is called with: `[bs]` lengths, of which `kept` tokens have a slot, `[T]` tokens of all."""

    prefix: Int64Array
    extend: Int64Array
    kept: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    metadata: Any  # of the draft's attention

    def tokens_of(self, chosen: Int64Array) -> Int64Array:
        """Return which tokens have a slot, of some of the batch's requests, `chosen` `[n]`."""
        return ragged_index((np.cumsum(self.extend) - self.extend)[chosen], self.kept[chosen])


class DraftForwards:
    """Records a draft's forwards behind those of its target."""

    def __init__(self, runner: Any, layout: VllmLayout, recorder: Recorder, requests: VllmRequests) -> None:
        self._group = layout.draft
        self._seen = layout.draft_offset is not None
        self._offset = layout.draft_offset or 0
        self._others = len(layout.groups)
        self._recorder = recorder
        self._kv = layout.kv
        self._known = requests
        self._runner = runner
        self._layers = runner.vllm_config.compilation_config.static_forward_context
        self._requests: Sequence[VllmRequest] = ()  # those that run, in batch order
        self._step: Step | None = None
        self._waves: list[Int64Array] = []  # the requests of each of the target's forwards
        self._rejected: Any = None  # [bs] drafts of the step that the target has rejected, None for none
        self._cached: Int64Array | None = None  # [bs] tokens that the draft's last forward has left in its cache
        self._first_end = np.empty(0, np.int64)  # [bs] the same of its first one of the step
        self._slots_at = -1  # which argument of what stores K and V has the slots

    def attach(self, on_fault: OnFault) -> None:
        """Hook the draft's model, or its first layer by what stores its K and V."""
        if self._group is None:
            return
        if self._seen:
            drafter = self._runner.drafter
            wrap_method(drafter, "propose", self.on_propose, on_fault)
            wrap_method(drafter.model, "forward", self.on_draft_model, on_fault)
            return
        impl = getattr(self._layers.get(self._group.layers[0]), "impl", None)
        update = getattr(impl, "do_kv_cache_update", None)
        names = [*inspect.signature(update).parameters] if callable(update) else []
        if "slot_mapping" not in names:  # which stands behind K and V, or what a layer stores in their place
            raise ValueError("a draft layer without do_kv_cache_update, so which slots it writes is unknown")
        self._slots_at = names.index("slot_mapping")
        wrap_method(impl, "do_kv_cache_update", self.on_draft, on_fault)

    def beside(self, forward: ForwardInput) -> ForwardInput:
        """Return a target's forward with what the trace's draft table has of it: nothing."""
        if self._group is None:
            return forward
        zeros = np.zeros_like(forward.prefix_lens)
        written = (*forward.out_cache_loc, np.full_like(forward.input_ids, -1))
        unread = TableRead(starts=zeros, counts=zeros, slots=zeros[:0])
        return replace(forward, out_cache_loc=written, reads=(*forward.reads, unread))

    def behind(self, step: Step, requests: Sequence[VllmRequest], forwards: Sequence[StepForward]) -> None:
        """Expect the draft's forwards behind a step of the target's, recorded as `forwards`."""
        self._step, self._requests, self._cached, self._rejected = step, requests, None, None
        self._waves = [chosen for _, _, chosen in forwards]

    def end_step(self) -> None:
        """Say that nothing is known of what the draft should have written, if it did not run behind the step."""
        group, step = self._group, self._step
        if self._seen and group is not None and step is not None and self._cached is None:
            mapping = self._runner.input_batch.block_table[group.gid].slot_mapping.gpu
            slots = own_int64(mapping[: step.input_ids.size])
            slots = slots[slots >= group.block_size]
            if slots.size:
                _say_unknown(self._recorder, group, slots)
        self._step = None

    def on_propose(self, *_args: Any, num_rejected_tokens_gpu: Any = None, **_kwargs: Any) -> None:
        """Take note of how many tokens of each request the drafter takes for rejected, `[bs]`."""
        self._rejected = num_rejected_tokens_gpu

    def on_draft_model(
        self, *_args: Any, input_ids: Any = None, positions: Any = None, inputs_embeds: Any = None, **_kwargs: Any
    ) -> Finish | None:
        """Record a forward of the draft's model: what goes in before it, what it wrote after it."""
        call, group = self._call(None if inputs_embeds is not None else input_ids, positions), self._group
        if call is None:
            return None
        first, self._cached = self._cached is None, call.prefix + call.extend
        if first:
            if self._rejected is not None:
                self._cached -= own_int64(self._rejected[: call.prefix.size])
            self._first_end = self._cached
            last = np.where(call.kept > 0, np.cumsum(call.extend) - call.extend + call.kept - 1, -1)
            after, tokens = call.prefix + call.kept - 1 + self._offset, [known.tokens for known in self._requests]
            counts = np.array([known.count for known in tokens], np.int64)
            leave_out_chunk_ends(call.input_ids, last, after, counts, tokens)
        waves = self._waves if first else [np.arange(call.prefix.size, dtype=np.int64)]
        waves = [wave for wave in (wave[call.kept[wave] > 0] for wave in waves) if wave.size]
        forwards = [self._forward("draft_extend" if first else "decode", call, wave) for wave in waves]
        if not forwards:
            return None
        got = self._attention(call)
        self._begin(forwards[0], got, waves[0])
        self._kv.take_submitted()  # what no forward has taken

        def finish(_: Any, error: BaseException | None) -> None:
            again = self._attention(call) if error is None else got
            if got is not None and again is not None and not same_attention([got], [again]):
                self._recorder.attention(chosen_attention(again, waves[0]))
            note = "" if error is None else f"the draft model raised {self._recorder.error_text(error)}"
            given = self._kv.take_submitted({group.index: call.slots}) if error is None and group is not None else {}
            for number, (forward, wave) in enumerate(zip(forwards, waves, strict=True)):
                if number:
                    self._begin(forward, again, wave)
                submitted = of_tokens(given, call.tokens_of(wave))
                self._recorder.after_forward(note=note, failed=error is not None, submitted=submitted)

        return finish

    def _begin(self, forward: ForwardInput, got: AttentionInput | None, wave: Int64Array) -> None:
        self._recorder.before_forward(forward)
        if got is not None:
            self._recorder.attention(chosen_attention(got, wave))

    def _call(self, input_ids: Any, positions: Any) -> DraftCall | None:
        """Return what the draft's model is about to get, None for a dummy run; raise `ValueError` if it does not fit."""
        context, group, step, bs = forward_context(), self._group, self._step, len(self._requests)
        metadata, mappings = getattr(context, "attn_metadata", None), getattr(context, "slot_mapping", None)
        if group is None or step is None or not isinstance(metadata, dict) or not isinstance(mappings, dict):
            return None
        mine, mapping = metadata.get(group.layers[0]), mappings.get(group.layers[0])
        starts = getattr(mine, "query_start_loc", None)
        if starts is None or mapping is None or positions is None:
            return None
        starts, slots = own_int64(starts[: bs + 1]), own_int64(mapping)
        extend = np.diff(starts)
        if extend.size != bs or (extend < 0).any() or starts[-1] > min(slots.size, len(positions)):
            raise ValueError("a draft's metadata do not fit the requests of its step")
        count = int(starts[-1])
        named = input_ids is not None and not getattr(self._runner.drafter, "use_heterogeneous_vocab", False)
        slots = slots[:count]
        return DraftCall(
            prefix=step.prefix if self._cached is None else self._cached,
            extend=extend,
            kept=last_held(slots, extend),
            input_ids=own_int64(input_ids[:count]) if named else np.full(count, UNKNOWN_TOKEN, np.int64),
            positions=own_int64(positions[:count]),
            slots=slots,
            metadata=mine,
        )

    def _forward(self, mode: Any, call: DraftCall, chosen: Int64Array) -> ForwardInput:
        """Return the forward of some of the batch's requests, `chosen` `[n]`."""
        assert self._group is not None
        kept, prefix, tokens = call.kept[chosen], call.prefix[chosen], call.tokens_of(chosen)
        mine = [self._requests[r] for r in chosen.tolist()]
        zeros, nothing = np.zeros_like(kept), np.full(tokens.size, -1, np.int64)
        unread = TableRead(starts=zeros, counts=zeros, slots=zeros[:0])
        table = self._runner.input_batch.block_table[self._group.gid]
        read = table_read(table.block_table.gpu, int(table.block_size), self._group, call.prefix)
        return ForwardInput(
            mode=mode,
            runner=DRAFT_RUNNER,
            req_pool_indices=np.array([known.row for known in mine], np.int64),
            request_ids=np.array([known.request_id for known in mine], np.int64),
            prefix_lens=prefix,
            extend_lens=kept,
            input_ids=call.input_ids[tokens],
            positions=call.positions[tokens],
            out_cache_loc=(*[nothing] * self._others, call.slots[tokens]),
            reads=(*[unread] * self._others, chosen_reads(read, chosen)),
            # Behind the first forward come guesses, though the prompt may go on otherwise.
            truth=self._known.truth(mine, None if mode == "draft_extend" else self._first_end[chosen] + self._offset),
        )

    def _attention(self, call: DraftCall) -> AttentionInput | None:
        """Return what the draft's attention gets now, of the tokens that have a slot; None if its metadata are not known."""
        bs, group = call.prefix.size, self._group
        tensors: list[Any] = [getattr(call.metadata, name, None) for name in FIELDS]
        size = kernel_block_size(self._runner, group)
        if group is None or not size or not all(hasattr(tensor, "data_ptr") for tensor in tensors):
            return None
        without = call.extend - call.kept
        seq_lens = own_int64(tensors[0][:bs]) - without
        query_lens = np.diff(own_int64(tensors[1][: bs + 1])) - without
        first = np.maximum(call.prefix - group.window, 0) if group.window else None
        read = paged_read(tensors[2], size, np.clip(seq_lens, 0, int(tensors[2].shape[1]) * size), starts=first)
        return AttentionInput(seq_lens=seq_lens, query_lens=query_lens, slots=(*[None] * self._others, read))

    def on_draft(self, *args: Any, slot_mapping: Any = None, **_kwargs: Any) -> None:
        """Record of a draft's forward what its first layer stores K and V of."""
        metadata = getattr(forward_context(), "attn_metadata", None)
        group = self._group
        mine = metadata.get(group.layers[0]) if group is not None and isinstance(metadata, dict) else None
        starts = getattr(mine, "query_start_loc", None)
        count = len(self._requests)
        if starts is None or not count:
            return  # a dummy run, or warm-up
        starts, slots = (
            own_int64(starts[: count + 1]),
            own_int64(args[self._slots_at] if slot_mapping is None else slot_mapping),
        )
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
                req_pool_indices=np.array([known.row for known in self._requests], np.int64),
                request_ids=np.array([known.request_id for known in self._requests], np.int64),
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


def last_held(slots: Int64Array, extend: Int64Array) -> Int64Array:
    """Return up to which of its tokens, `extend` `[bs]`, each request has slots: rejected ones may come last, without any."""
    starts, last = np.cumsum(extend) - extend, np.zeros(extend.size, np.int64)
    held = np.flatnonzero(slots >= 0)
    owner = np.repeat(np.arange(extend.size), extend)[held]
    np.maximum.at(last, owner, held - starts[owner] + 1)
    return last


def leave_out_chunk_ends(
    input_ids: Int64Array,
    last: Int64Array,
    after: Int64Array,
    counts: Int64Array,
    tokens: Sequence[TokenSource],
    *,
    any_token: bool = False,
) -> None:
    """Take for unknown what a draft is fed behind a part of a prompt, if it is the last token of all, as 0.32 does.

    Of each request it is fed `input_ids[last]`, -1 for none, in place of its token `after`, of `counts` that it has, `[bs]`
    each. With `any_token` it is unknown whatever other token it is.
    """
    for r in np.flatnonzero((last >= 0) & (after < counts - 1)).tolist():
        fed, count = input_ids[last[r]], int(counts[r])
        right, newest = tokens[r].tokens(int(after[r]), int(after[r]) + 1), tokens[r].tokens(count - 1, count)
        if (fed != right).any() and (any_token or (fed == newest).any()):
            input_ids[last[r]] = UNKNOWN_TOKEN


def kernel_block_size(runner: Any, group: VllmGroup | None) -> int:
    """Return the tokens of a block of the table that the draft's attention gets, 0 if its metadata are not known."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    by_group = getattr(drafter, "attn_groups", None) or ()
    found = [*(getattr(drafter, "draft_attn_groups", None) or ()), *(one for groups in by_group for one in groups)]
    mine = next((one for one in found if group is not None and group.layers[0] in one.layer_names), None)
    elsewhere = getattr(mine, "kernel_block_size", None) is not None  # its kernels get another table than the runner's
    if group is None or mine is None or elsewhere or str(mine.backend.get_name()) not in PLAIN_BACKENDS:
        return 0
    if hasattr(runner, "input_batch"):
        return int(runner.input_batch.block_table[group.gid].block_size)
    return int(runner.block_tables.block_sizes[group.gid])


def forget_last(recorder: Recorder | DeviceRecorder, layout: VllmLayout, known: VllmRequest, computed: int) -> None:
    """Say that nothing is known of a draft's K and V of the last of a session's `computed` tokens, with which that goes on.

    They depend on the token behind it, another one now, and the drafter does not run over it again.
    """
    group = layout.draft
    if group is None or not layout.draft_offset or computed < 1 or group.gid >= len(known.blocks):
        return
    blocks, (place, offset) = known.blocks[group.gid], divmod(computed - 1, group.block_size)
    if place < len(blocks) and blocks[place]:
        _say_unknown(recorder, group, np.array([blocks[place] * group.block_size + offset], np.int64))


def _say_unknown(recorder: Recorder | DeviceRecorder, group: VllmGroup, slots: Int64Array) -> None:
    transfers_of(recorder)(
        "end", direction=RECEIVE, room=-1, group=group.index, slots=slots, peer="drafter", note=NOT_RUN
    )
