"""A draft model's forwards on a GPU, captured there without a wait: of either runner, behind those of its target.

Each forward is one of a runner of its own: a first one over the target's tokens, rejected ones among them, then one for each
further token that is drafted. What the device alone knows of it when it is captured (how many tokens were rejected, which
have a slot) is looked at by the recorder's thread. The V2 runner may have all steps behind the first in one CUDA graph:
what goes into each of them is nowhere to be seen, so they are not recorded, and the header says so.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from .....kernels.arrays import Int64Array
from .....kernels.capture.frames import AttentionLens, EngineTable, ModelInput
from .....kernels.constants import UNKNOWN_TOKEN
from ....capture.device.forward import BatchRequests, DeviceForward, ForwardPart
from ....capture.device.recorder import DeviceRecorder
from ....capture.forward_input import CopiedForward
from ....trace.header import TraceHeader
from ....trace.schema import RECEIVE
from ...common.hooking import Finish, OnFault, wrap_method
from ..attention.given import FIELDS
from ..device import DeviceSteps, TargetStep, block_tables, in_one
from ..layout import DRAFT_RUNNER, VllmGroup, VllmLayout
from ..step import forward_context
from .forwards import NOT_RUN, kernel_block_size, last_held, leave_out_chunk_ends

# Twice as much as without a draft: target and draft each have a forward of a step that may admit requests.
FRAME_BYTES: Final = 128 << 20


def begin_on_device(
    path: Path, header: TraceHeader, runner: Any, layout: VllmLayout, options: dict[str, Any]
) -> "tuple[DeviceRecorder, DeviceSteps, DeviceDrafts | None]":
    """Return a recorder, and what has the device capture a runner's steps and its draft's forwards; raise as the first does."""
    tables = block_tables(runner, layout.all_groups)
    room = options if layout.draft is None else options | {"frame_bytes": FRAME_BYTES}
    recorder = DeviceRecorder(path, header, tables=tables, luts=(), **room)
    steps = DeviceSteps(recorder, layout.groups, tables[: len(layout.groups)], layout.states)
    drafts = None if layout.draft is None else DeviceDrafts(runner, layout, recorder, steps, tables[-1])
    return recorder, steps, drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequests(BatchRequests):
    """The requests of one of a draft's forwards, and what is found out about it once the device has run it.

    `table` is the draft's, `width` the positions that it has; `behind` is how many forwards of the draft's came before it in
    its step; `offset` how far its tokens are ahead; `named` says whether they are the target's; `rejected` gets `[bs]` tokens
    that are no request's, if their slots do not say so; `any_chunk_end` says whether what is fed behind a part of a prompt
    may be any token.
    """

    table: int
    width: int
    behind: int
    offset: int
    named: bool
    any_chunk_end: bool
    rejected: list[Int64Array] = field(default_factory=list)

    def settle(self, forward: CopiedForward, truth_lens: Int64Array) -> tuple[Int64Array, Int64Array]:
        """As `ForwardRequests` has it; raise a `ValueError` for lengths that do not fit the tokens."""
        extend, prefix = forward.extend_lens, forward.prefix_lens
        if (extend < 0).any() or extend.sum() > forward.input_ids.size:
            raise ValueError("a draft's metadata do not fit the requests of its step")
        starts = np.cumsum(extend) - extend
        kept = last_held(forward.out_cache_loc[self.table][: extend.sum()], extend)
        # What is behind the last position the V2 runner puts there, on top of what that has.
        kept = np.minimum(kept, np.maximum(self.width - prefix, 0))
        if self.rejected:
            kept = np.clip(extend - self.rejected[0], 0, kept)
        if not self.named:
            forward.input_ids.fill(UNKNOWN_TOKEN)
        if self.behind:  # behind the first forward come guesses, though the prompt may go on otherwise
            return kept, np.minimum(truth_lens, np.maximum(prefix - (self.behind - 1) + self.offset, 0))
        last, after = np.where(kept > 0, starts + kept - 1, -1), prefix + kept - 1 + self.offset
        leave_out_chunk_ends(forward.input_ids, last, after, truth_lens, self.truth or (), any_token=self.any_chunk_end)
        return kept, truth_lens


class DeviceDrafts:
    """Has the device capture a draft's forwards behind those of its target."""

    def __init__(
        self, runner: Any, layout: VllmLayout, recorder: DeviceRecorder, steps: DeviceSteps, own: EngineTable
    ) -> None:
        assert layout.draft is not None
        assert layout.draft_offset is not None
        self._group: VllmGroup = layout.draft
        self._groups = layout.all_groups
        self._offset = layout.draft_offset
        self._recorder = recorder
        self._runner = runner
        self._steps = steps
        self._v1 = hasattr(runner, "input_batch")
        self._drafter = runner.drafter if self._v1 else runner.speculator
        self._own = own  # the runner's block table
        self._reads = (int(own.table.data_ptr()), int(own.table.stride(0)))  # the one that is compared
        self._names = list(inspect.signature(self._drafter.propose).parameters)
        self._run_names = [] if self._v1 else list(inspect.signature(self._drafter._run_model).parameters)
        self._target: TargetStep | None = None  # behind which it drafts, None while it does not
        self._given: dict[str, Any] = {}  # what the drafter is called with
        self._cached: Any = None  # [bs] tokens that the draft's last forward has left in its cache, on the device
        self._forwards = 0  # of this step
        self._prepare()

    def _prepare(self) -> None:
        """Compile what a draft's forwards need before the engine waits for it."""
        import torch

        longs, ints = (torch.zeros(2, dtype=kind, device=self._own.table.device) for kind in (torch.int64, torch.int32))
        tokens = {"input_ids": ints, "positions": longs, "out_cache_loc": longs[:0], "num_tokens": 0}
        given = ModelInput(rows=longs[:1], prefix=longs[:1], extend=ints[:1], **tokens)
        for lens in (None, AttentionLens(seq_lens=ints, query_start_loc=ints, tables=True)):
            self._recorder.capture.prepare_for(given, lens)

    def attach(self, on_fault: OnFault) -> None:
        """Hook the drafter, what runs its model, and the graphs that it runs in the model's place."""
        drafter = self._drafter
        wrap_method(drafter, "propose", self.on_propose, on_fault)
        if self._v1:
            wrap_method(drafter.model, "forward", self.on_draft_model, on_fault)
            return
        wrap_method(drafter, "_run_model", self.on_run_model, on_fault)
        prefills, decodes = (getattr(drafter, f"{kind}_cudagraph_manager", None) for kind in ("prefill", "decode"))
        wrap_method(prefills, "run_fullgraph", self.on_first_graph, on_fault)
        if not getattr(drafter, "supports_decode_metadata_update", False):
            wrap_method(decodes, "run_fullgraph", self.on_step_graph, on_fault)

    def end_step(self) -> None:
        """Say that nothing is known of what the draft should have written, if it did not run behind the step."""
        target, gid = self._steps.target, self._group.gid
        if target is not None and not (target is self._target and self._forwards):
            tables = self._runner.input_batch.block_table if self._v1 else self._runner.block_tables.slot_mappings
            slots = (tables[gid].slot_mapping.gpu if self._v1 else tables[gid])[: target.num_tokens]
            # It waits, in a step that has reached the end of what the draft can hold.
            slots = slots[slots >= self._group.block_size]
            if len(slots):
                self._recorder.transfer(
                    "end",
                    direction=RECEIVE,
                    room=-1,
                    group=self._group.index,
                    slots=slots,
                    peer="drafter",
                    note=NOT_RUN,
                )
        self._steps.target = self._target = self._cached = None
        self._given = {}

    def on_propose(self, *args: Any, **kwargs: Any) -> None:
        """Take note of what the drafter is given, behind a step of the target's."""
        self._target, self._cached, self._forwards = self._steps.target, None, 0
        self._given = dict(zip(self._names, args, strict=False)) | kwargs

    def on_draft_model(
        self, *_args: Any, input_ids: Any = None, positions: Any = None, inputs_embeds: Any = None, **_kwargs: Any
    ) -> Finish | None:
        """Capture a forward of the V1 runner's draft model: what goes in before it, what it wrote after it."""
        context, layer = forward_context(), self._group.layers[0]
        metadata, mappings = getattr(context, "attn_metadata", None), getattr(context, "slot_mapping", None)
        if not isinstance(metadata, dict) or not isinstance(mappings, dict) or positions is None:
            return None  # a dummy run
        named = inputs_embeds is None and not getattr(self._drafter, "use_heterogeneous_vocab", False)
        slots = [mappings.get(group.layers[0]) for group in self._groups]
        return self._capture(metadata.get(layer), slots, input_ids, positions, named=named)

    def on_run_model(self, *args: Any, **kwargs: Any) -> Finish | None:
        """Capture a forward of the V2 runner's, whose model may be compiled as a whole."""
        given = dict(zip(self._run_names, args, strict=False)) | kwargs
        metadata, mappings = given.get("attn_metadata"), given.get("slot_mappings")
        if not isinstance(metadata, dict) or not isinstance(mappings, dict):
            return None  # a dummy run
        input_ids, positions, own = given.get("input_ids"), given.get("positions"), self._drafter.input_buffers
        if input_ids is None or positions is None:
            input_ids, positions = own.input_ids[: given["num_tokens"]], own.positions[: given["num_tokens"]]
        slots = [mappings.get(group.layers[0]) for group in self._groups]
        named = not getattr(self._drafter, "supports_mm_inputs", False)
        return self._capture(metadata.get(self._group.layers[0]), slots, input_ids, positions, named=named)

    def on_first_graph(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Capture the draft's first forward where it runs as a graph, which reads the drafter's and the target's buffers."""
        metadata, own = self._given.get("attn_metadata"), self._drafter.input_buffers
        mine = metadata.get(self._group.layers[0]) if isinstance(metadata, dict) else None
        count = 0 if self._target is None else self._target.num_tokens
        return self._capture(mine, self._slots(), own.input_ids[:count], own.positions[:count])

    def on_step_graph(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Capture a further forward that runs as a graph of its own, which reads the drafter's buffers."""
        own, count = self._drafter.input_buffers, 0 if self._target is None else len(self._target.batch.names)
        given = SimpleNamespace(seq_lens=own.seq_lens, query_start_loc=own.query_start_loc, block_table=self._own.table)
        return self._capture(given, self._slots(), own.input_ids[:count], own.positions[:count])

    def _slots(self) -> list[Any]:
        return [self._runner.block_tables.slot_mappings[group.gid] for group in self._groups]

    def _capture(
        self, given: Any, slots: Sequence[Any], input_ids: Any, positions: Any, *, named: bool = True
    ) -> Finish | None:
        """Capture a forward that is about to run; `given` holds the lengths and the block table that attention gets.

        `slots` are those of each group, the draft's last; None for another's that are not known.
        """
        target, starts = self._target, getattr(given, "query_start_loc", None)
        if target is None or starts is None or slots[-1] is None or self._given.get("dummy_run"):
            return None
        count = min(len(positions), len(slots[-1]), getattr(given, "num_actual_tokens", len(positions)))
        bs, first = len(target.batch.names), not self._forwards
        extend = starts[: bs + 1].diff()
        prefix = target.prefix() if self._cached is None else self._cached
        self._cached = prefix + extend
        rejected = None
        if first:
            rejected = self._given.get("num_rejected_tokens_gpu") if self._v1 else self._given["num_rejected"]
        if rejected is not None:
            self._cached = self._cached - rejected[:bs]
        requests = self._requests(target, named=named and input_ids is not None)
        if rejected is not None and not self._v1:  # the V2 runner's have slots, and nothing in their places
            self._recorder.later_with(requests.rejected.append, rejected[:bs])
        mode, parts = "draft_extend" if first else "decode", target.batch.parts if first else ()
        self._forwards += 1
        self._recorder.before_forward(
            DeviceForward(
                mode=mode,
                runner=DRAFT_RUNNER,
                rows=target.batch.there[0],
                prefix=prefix,
                extend=extend,
                input_ids=positions if input_ids is None else input_ids,
                positions=positions,
                out_cache_loc=in_one(self._written(slots, target, count, first=first), count),
                num_tokens=count,
                requests=requests,
                truth_lens=[tokens.count for tokens in target.batch.tokens],
                parts=tuple(ForwardPart(mode, part.requests) for part in parts),
                attention=self._lens(given),
                new_rows=first and target.new_rows,
            )
        )
        return self._end

    def _written(self, slots: Sequence[Any], target: TargetStep, count: int, *, first: bool) -> list[Any]:
        """Return where the tokens go, of each table: others' hold what the target has put there, and shall go on to do so."""
        found = []
        for place, (group, own) in enumerate(zip(self._groups, slots, strict=True)):
            if group.gid == self._group.gid:
                found.append(slots[-1])
            elif own is not None:
                found.append(own)
            else:  # behind the target's tokens nobody reads before the target writes there itself
                same = first and count == target.num_tokens
                found.append(target.written[place] if same else slots[-1].new_full((count,), -1))
        return found

    def _end(self, _: Any, error: BaseException | None) -> None:
        note = "" if error is None else f"the draft model raised {self._recorder.error_text(error)}"
        self._recorder.after_forward(note=note, failed=error is not None)

    def _requests(self, target: TargetStep, *, named: bool) -> DraftRequests:
        tokens: Sequence[Any] = list(target.batch.tokens)
        return DraftRequests(
            ids=target.batch.requests.ids,
            truth=tokens,
            table=self._group.index,
            width=self._recorder.header.tables[self._group.index].width,
            behind=self._forwards,
            offset=self._offset,
            named=named,
            any_chunk_end=not self._v1 and self._offset == 0,
        )

    def _lens(self, given: Any) -> AttentionLens | None:
        """Return the lengths that the draft's attention gets, and have its block table compared, None if they are not known."""
        seq_lens, starts, table = (getattr(given, name, None) for name in FIELDS)
        bs = 0 if self._target is None else len(self._target.batch.names)
        known = kernel_block_size(self._runner, self._group) and seq_lens is not None and len(seq_lens) >= bs
        fits = known and table is not None and table.stride(1) == 1 and table.dtype == self._own.table.dtype
        self._read_table(table if fits else self._own.table)
        if not known:
            return None
        return AttentionLens(seq_lens=seq_lens, query_start_loc=starts, tables=bool(fits))

    def _read_table(self, table: Any) -> None:
        """Have the frames' kernels compare this table from now on: mostly it is the runner's own, as before."""
        lies = (int(table.data_ptr()), int(table.stride(0)))
        if lies != self._reads:
            self._reads = lies
            self._recorder.capture.shadows.move_table(DRAFT_RUNNER, self._group.index, table)
