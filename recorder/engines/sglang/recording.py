"""One scheduler's recording: what its forwards, requests and slots mean in the recorder's words."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from ...capture.device.recorder import DeviceRecorder
from ...capture.forward_input import CopiedForward
from ...capture.host_arrays import own_int64
from ...capture.recording import beginning
from ...process.settings import RecordingSettings
from ...trace.header import NotWatched, TraceHeader
from ...trace.schema import RequestStatus
from ...writing.trace_file import begin_new
from ..common.attachment import trace_name
from ..common.hooking import Around, Finish, around, beside
from .adapters import BatchAdapters
from .attention.outputs import AttentionOutputs, with_outputs
from .attention.windows import WindowReads, with_windows
from .connectors.transfers import SglangTransfers, room_of
from .forward import DeviceForwards, draft_steps, forward_input, mode_of
from .history import GroupHistory, RadixCacheWalk, allocators_of, knows_allocator, promised, sweeps_promised
from .inside import Expected, InsideModels
from .layers import ModelLayers, attention_input
from .layout import RunnerLayout, SglangLayout, describe_engine, on_gpu, own_slots
from .opening import open_recorder, without_unseen
from .recurrent import StateHooks
from .requests import BatchLookup, KnownBatch, SglangRequest, SglangRequests, StepResults, identity_of, row_of
from .submitted import SubmittedKv
from .trees import draft_tree, record_filled

logger = logging.getLogger("kvcanary")


class SglangRecording:
    """Records one `Scheduler` and its model runners into one trace; what begins with `on_` is a hook.
    Methods may raise: the hooks that call them catch it.
    """

    def __init__(
        self,
        scheduler: Any,
        model_runners: list[Any],
        settings: RecordingSettings,
        notes: tuple[str, ...],
        not_watched: tuple[NotWatched, ...],
        inside: InsideModels,
        layers: ModelLayers,
        begins: Callable[[TraceHeader], TraceHeader],
    ) -> None:
        self.target: Any = next((runner for runner in model_runners if not runner.is_draft_worker), None)
        if self.target is None:
            raise ValueError("this process has no target model runner")
        self.layout = SglangLayout(model_runners, settings)
        header = describe_engine(scheduler, self.layout, self.target, settings, notes)
        allocator, server_args = scheduler.token_to_kv_pool_allocator, self.target.server_args
        self.follows_slots = knows_allocator(allocator) and settings.history != "off"
        tree_cache = scheduler.tree_cache  # what this version does not have shows before there is a file
        header = promised(header, allocator, server_args, followed=self.follows_slots)
        header = sweeps_promised(header, tree_cache)
        self._tree = draft_tree(server_args)
        if self._tree:
            not_watched += (
                NotWatched(what="other", name="drafts", reason=f"{self._tree}; nothing is known of what they fill"),
            )
        on_device = on_gpu(self.layout.tables[0])
        in_layers = not on_device and layers.watches(id(self.target))
        self.submitted = SubmittedKv(self.layout) if in_layers else None
        self.windows = WindowReads(model_runners, self.layout) if in_layers else None
        self.outputs = AttentionOutputs(model_runners, self.layout, settings.outputs_every) if in_layers else None
        states = inside.watches(self.target) if on_device else in_layers
        header = dataclasses.replace(header, not_watched=(*header.not_watched, *not_watched))
        header = without_unseen(
            header, self.layout, model_runners, states=states, submitted=self.submitted, windows=self.windows
        )
        header = begins(header)
        self.requests = SglangRequests(exact_ids=header.oracle is not None)
        settings.folder.mkdir(parents=True, exist_ok=True)
        self.recorder = begin_new(
            settings.folder / trace_name("sglang", header),
            lambda path: open_recorder(path, header, settings, self.layout, model_runners, inside),
        )
        with beginning(self.recorder):
            if isinstance(self.recorder, DeviceRecorder) and inside.probed is not None:
                inside.probed.begin(self.recorder, self.layout.runners[id(self.target)], settings.outputs_every)
            self.sweep = RadixCacheWalk(self.target, tree_cache, self.layout, header.sweep_interval, self.recorder)
        self.histories: list[GroupHistory] = []
        self.states = StateHooks(self.recorder, 0, self.target) if self.recorder.header.states else None
        self.transfers = SglangTransfers(self.layout, self.recorder, self.histories, self.see)
        self.retracting = False
        self.restores = True  # whether what is retracted meanwhile gets its KV back
        self.batches = BatchLookup(self.requests)
        self.adapters = BatchAdapters(self.target)
        self.results = StepResults(self.recorder, self.batches)
        self._layers = layers
        self._begun_inside = False
        self._tokens = 0  # of the forward that runs
        self._left_out = False  # whether the forward that runs is one over a tree of drafts
        self._capture = self.recorder.capture if isinstance(self.recorder, DeviceRecorder) else None
        # Bound once: each step would make it anew otherwise, and leave it to the collector of garbage.
        self._on_device = None if self._capture is None else DeviceForwards(self._capture).record
        self._ended: Finish | None = None if self._capture is None else self._capture.ended
        self._inside = inside if self._capture is not None and inside.watches(self.target) else None
        # Of a forward that is to be recorded inside its model: what records it from outside, until the model is called.
        self._outside: Callable[[], Any] | None = None
        self._weights = 0  # how often they have been changed,
        self._weights_known = True  # and whether the last time succeeded: else nobody knows what they are
        self.reqs: list[Any] = []
        self.beam_tail: Any = None  # of the batch that runs: what says that its last rows are beams
        self.members: list[str] = []  # and whose
        self._beams: dict[int, SglangRequest] = {}  # whose beam each row was last
        logger.info("%s", settings.start_up_line(self.recorder.path, self.recorder.header))

    def cost(self) -> dict[str, int]:
        """Return what the recording has cost so far: forwards, and memory on the device and pinned on the host."""
        recorder = self.recorder
        memory = {}
        if isinstance(recorder, DeviceRecorder):
            memory = {"device_bytes": recorder.device_bytes, "pinned_bytes": recorder.pinned_bytes}
        return {"forwards": recorder.next_forward, **memory}

    def keep_history(self, allocator: Any) -> None:
        """Find the allocators behind the groups; slots that they give out are recorded from now on."""
        for kind, part in allocators_of(allocator):
            groups = tuple(runner.groups[kind] for runner in self.layout.runners.values() if kind in runner.groups)
            if groups:
                num_slots = max(self.layout.groups[group].num_slots for group in groups)
                self.histories.append(GroupHistory(part, groups, num_slots, self.recorder))
        if isinstance(self.recorder, DeviceRecorder):
            self.recorder.before_each(self._record_written_on_device)
            self.recorder.capture.carries = True

    def _record_written_on_device(self, forward: CopiedForward) -> None:
        for history in self.histories:
            for number in history.groups:
                if self.layout.groups[number].runner == forward.runner:
                    history.written(forward.written[number], forward.rows, forward.request_ids, forward.extend_lens)

    # Forwards

    def before_model(self, layout: RunnerLayout, batch: Any, bs: int) -> None:
        """Record the forward of `bs` requests that a model runner is about to run.

        Raises:
            ValueError: a batch that cannot be recorded.
        """
        if layout.fed is not None:
            layout.fed.expect(batch)
        rids = batch.rids if not self.members else [*(batch.rids or ()), *self.members]
        known = self.batches.of(rids, bs)
        if layout.sampled:
            known = self.adapters.of(batch, known)
        if getattr(batch, "spec_info", batch) is not None:  # a speculative worker may append what it has verified
            self.results.moment += 1
        if self._tree and (batch.forward_mode.name == "TARGET_VERIFY" or not (layout.sampled or _extends(batch))):
            self._leave_out(layout, batch)
            return
        if self._on_device is not None:
            moment = self.results.moment
            lens = known.lens if known.moment == moment else known.output_lens(moment)
            if self._inside is not None:
                capture: Any = self._capture
                self._inside.expected = Expected(capture, layout.runner, layout.index, bs, known, lens)
                self._outside = functools.partial(self._on_device, layout, batch, known, lens)
                number: int = capture.next_forward  # `after_model` sees whether it was recorded inside
            else:
                number = self._on_device(layout, batch, known, lens)
        else:
            number = self.recorder.next_forward
            if self._layers.watches(layout.runner) and batch.forward_mode.name != "SPLIT_PREFILL":
                begin = functools.partial(self._begin, layout, batch, batch.forward_mode)
                self._layers.expected = (layout.runner, begin)
                self._outside = functools.partial(self._on_host, batch, layout, known)
            else:
                self._on_host(batch, layout, known)
        if layout.sampled:  # a diffusion's step settles tokens that it was fed: none of them stands behind those
            self.results.last_target = None if batch.forward_mode.name == "DLLM_EXTEND" else (number, known)

    def _leave_out(self, layout: RunnerLayout, batch: Any) -> None:
        """Record no forward over a tree of drafts, and that it fills slots."""
        self._left_out, self.results.last_target = True, None
        record_filled(self.recorder, self.layout, self.histories, layout, batch.out_cache_loc)

    def _on_host(self, batch: Any, layout: RunnerLayout, known: KnownBatch, forward_mode: Any = None) -> None:
        recorder: Any = self.recorder
        given = forward_input(
            batch,
            runner=layout,
            layout=self.layout,
            request_ids=known.ids,
            truth=self.requests.truth(known.rids, known.rows),
            forward_mode=forward_mode,
            states=self.states if self._begun_inside and layout.sampled else None,
        )
        if known.identity:
            given = dataclasses.replace(given, identity=known.identity)
        for history in self.histories:
            self.record_written(history, layout, given)
        self._tokens = given.input_ids.size
        if self.submitted is not None:
            self.submitted.take(0)  # what no forward has taken
        recorder.before_forward(given)

    def record_written(self, history: GroupHistory, layout: RunnerLayout, given: Any) -> None:
        """Record whose the slots are that a forward writes, of those that an allocator has given out."""
        for number in layout.groups.values():
            if number in history.groups:
                slots = own_slots(self.layout, number, given.out_cache_loc[layout.table])
                history.written(slots, given.req_pool_indices, given.request_ids, given.extend_lens)

    def _begin(self, layout: RunnerLayout, outer: Any, forward_mode: Any, model_runner: Any, batch: Any) -> Finish:
        """Record a forward whose model has been called with `batch`; return what completes it after the last layer."""
        recorder: Any = self.recorder
        self._outside, self._begun_inside = None, True
        known = self.adapters.of(outer, self.batches.of(outer.rids, batch.req_pool_indices.numel()))
        self._on_host(batch, layout, known, forward_mode)

        def look() -> None:
            attention = attention_input(model_runner, batch, mode_of(forward_mode), layout, self.layout)
            attention = with_windows(attention, {} if self.windows is None else self.windows.take())
            attention = with_outputs(attention, self.outputs)
            if attention is not None:
                recorder.attention(attention)

        def finish(_: Any, error: BaseException | None) -> None:
            if error is None:
                look()  # what was changed meanwhile, a layer may have read
            self._complete(error)

        if self.windows is not None:
            self.windows.take()  # what a forward that failed has left
        with_outputs(None, self.outputs)
        look()
        return finish

    def _complete(self, error: BaseException | None) -> None:
        note = "" if error is None else f"the model raised {self.recorder.error_text(error)}"
        said: dict[str, Any] = {} if self.submitted is None else {"submitted": self.submitted.take(self._tokens)}
        self.recorder.after_forward(note=note, failed=error is not None, **said)

    def after_model(self, _: Any, error: BaseException | None) -> None:
        """Complete the forward; its tokens are sampled later."""
        if self._left_out:
            self._left_out = False
            return
        if self._ended is not None:
            outside = self._outside
            expected = self._end_expected(error)
            if expected is not None and not expected.captured and outside is not None:
                outside()  # no model of ours was run, or in a graph without our launches
            self._ended(None, error)
            return
        if self._layers.expected is not None and self._outside is not None:
            self._outside()  # the model was never called
        self._layers.expected = None
        inside, self._begun_inside, self._outside = self._begun_inside, False, None
        if not inside:
            self._complete(error)

    def _end_expected(self, error: BaseException | None) -> Expected | None:
        """Return the forward that was expected inside its model, None for none, and deliver what a graph captured of it.

        Raises:
            RuntimeError: the graph failed.
        """
        self._outside = None
        if self._inside is None:
            return None
        expected, self._inside.expected = self._inside.expected, None
        if expected is not None and expected.in_flight:
            if error is not None:  # nobody knows whether its launches ever run
                said = self.recorder.error_text(error)
                raise RuntimeError(f"a CUDA graph with the recorder's launches failed: {said}")
            expected.deliver()
        return expected

    def draft_graph(self, graph_runner: Any, batch: Any) -> Finish:
        """Record a draft's steps that run as one CUDA graph, each as it is captured in the graph, else after it."""
        layout = self.layout.runners[id(graph_runner.model_runner)]
        if self._tree:
            self._leave_out(layout, batch)
            return self.after_model
        if self._inside is not None and self._inside.in_graphs(getattr(graph_runner, "backend", None)):
            self.before_model(layout, batch, batch.req_pool_indices.numel())
            return self._after_draft_graph
        own: Any = (lambda tensor: tensor.clone()) if isinstance(self.recorder, DeviceRecorder) else own_int64
        steps = draft_steps(batch, own)

        def record(result: Any, error: BaseException | None) -> None:
            for step in steps(result) if error is None else ():
                self.before_model(layout, step, step.req_pool_indices.numel())
                self.after_model(None, None)

        return record

    def _after_draft_graph(self, _: Any, error: BaseException | None) -> None:
        expected = self._end_expected(error)
        if expected is not None and not expected.captured and error is None:
            self.recorder.lost("a draft's steps ran in a CUDA graph without the recorder's launches")

    # Requests

    def see(self, req: Any) -> SglangRequest:
        """Return a request of the engine's; a new one is recorded."""
        known, new = self.requests.see(req)
        if new:
            self._say(known)
        return known

    def _say(self, known: SglangRequest) -> None:
        said: dict[str, Any] = {"prompt_len": len(known.req.origin_input_ids), "room": room_of(known.req)}
        known.weights = self._weights
        identity = identity_of(known.req, self._weights if self._weights_known else None)
        self.recorder.request(request_id=known.request_id, name=known.req.rid, **said, identity=identity)

    def new_weights(self, *, succeeded: bool) -> None:
        """Record that the model has other weights; requests that run go on with them, those that wait begin with them."""
        self._weights, self._weights_known = self._weights + 1, succeeded
        for known in self.requests.running():
            self._say(known)

    def runs(self, reqs: list[Any]) -> None:
        """Get to know the requests of a step that begins, if they are others than the last one's, `reqs`."""
        for req in reqs:
            self.see(req)
        self.reqs = list(reqs)

    def runs_beams(self, batch: Any) -> None:
        """Get to know the rows behind those of a batch's requests: beams, which have no name but their leader's."""
        self.beam_tail = batch.beam_tail
        self.members = []
        for entry in () if self.beam_tail is None else self.beam_tail.entries:
            leader = self.see(batch.reqs[entry.leader_idx])
            rows = entry.group.member_rows_cpu.tolist()
            self.members += [leader.req.rid] * len(rows)
            for row in rows:
                if self._beams.get(row) is not leader:
                    self._beams[row] = leader
                    self.recorder.request_status(request_id=leader.request_id, status="admitted", row=row, note="beam")

    @beside
    def on_rows(self, reqs: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record the requests that are given rows."""
        new = [req for req in reqs if row_of(req) < 0]
        try:
            yield
        finally:
            for req in new:
                if row_of(req) >= 0:
                    self.got_row(req)

    def got_row(self, req: Any) -> None:
        """Record that a request was given a row."""
        known = self.see(req)
        if known.weights != self._weights:  # it had been put back before they changed
            self._say(known)
        self.recorder.request_status(request_id=known.request_id, status="admitted", row=row_of(req))

    @around
    def on_row_free(self, req: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record a request that gives its row back."""
        if hasattr(req, "rid"):
            row = row_of(req)
            yield
            self.gave_row_back(req, row)

    def gave_row_back(self, req: Any, row: int) -> None:
        """Record what became of a request whose row is free again."""
        self.transfers.forget(req)
        finished, ends = req.finished(), getattr(req, "to_finish", None)
        status: RequestStatus
        if finished or ends is not None:
            reason = type(req.finished_reason if finished else ends).__name__
            status = "aborted" if "ABORT" in reason else "finished"
            self.requests.drop(req)
        else:
            status, reason = ("retracted", "") if self.retracting else ("aborted", "row freed before the end")
        self.recorder.request_status(request_id=self.requests.id_of(req), status=status, row=row, note=reason)
        if status == "retracted" and self.restores and self.recorder.header.role == "decode":
            self.recorder.lost("a decode engine restores a retracted request's KV from the host, which is not recorded")

    @beside
    def on_evict(self, *_args: Any, **_kwargs: Any) -> Around:
        """Call slots that are given back meanwhile evicted."""
        for history in self.histories:
            history.evicting = True
        try:
            yield
        finally:
            for history in self.histories:
                history.evicting = False


def _extends(batch: Any) -> bool:
    """Say whether a draft model goes over tokens that are no guesses."""
    return mode_of(batch.forward_mode) in ("extend", "draft_extend", "mixed", "idle")
