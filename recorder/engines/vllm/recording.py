"""One vLLM runner's recording: what its steps, its requests and its scheduler's blocks mean in the recorder's words."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.device.recorder import DeviceRecorder
from ...capture.forward_input import AttentionInput
from ...capture.recorder import Recorder
from ...process.settings import RecordingSettings
from ...trace.header import TraceHeader
from ...trace.schema import RequestStatus
from ...writing.trace_file import begin_new
from ..common.attachment import trace_name
from ..common.hooking import Around, EngineError, OnFault, Wraps, around, while_true
from ..common.injecting import recorder_class
from ..common.sampled import without_samples
from .attention.given import AttentionReader, chosen_attention, chosen_counts, same_attention
from .attention.outputs import OutputCalls, chosen_outputs
from .attention.windows import WindowCalls
from .blocks import BlockHistory, record_copies
from .connectors.external import ExternalLoads, connector_of
from .connectors.pairs import role_of
from .connectors.storages import members_of
from .device import DeviceStep, DeviceSteps, is_v1, on_gpu, why_it_waits
from .drafts.forwards import DraftForwards, forget_last
from .drafts.on_device import begin_on_device
from .identity import Identities
from .layout import VllmLayout, describe_engine
from .not_watched import not_watched, why_no_slots
from .results import StepResults, is_read
from .step import Step, StepForward, VllmRequest, VllmRequests, forwards_of, prompt_of, tokens_of
from .submitted import Submitted, of_tokens

logger = logging.getLogger("kvcanary")


class VllmRecording:
    """Records one `GPUModelRunner` into one trace; `scheduler` if it runs in this process, else None.

    Methods may raise: the hooks that call them catch it.
    """

    def __init__(
        self,
        runner: Any,
        scheduler: Any,
        settings: RecordingSettings,
        notes: tuple[str, ...],
        number: int,
        begins: Callable[[TraceHeader], TraceHeader],
    ) -> None:
        self.wraps = Wraps()  # of the engine's parts
        self.layout = layout = VllmLayout(runner, settings)
        members = members_of(runner, layout)
        storages = {one for member in members for one in (member.storage, member.landed) if one is not None}
        if storages:
            layout.keeps_elsewhere(*(storage.num_pages for storage in storages))
        self.attention = AttentionReader(runner, layout.groups, len(layout.all_groups))
        self.windows = WindowCalls(layout.groups)
        layers = runner.vllm_config.compilation_config.static_forward_context
        self.outputs = OutputCalls(layout.groups, layers, settings.outputs_every)
        layout.not_watched += not_watched(runner, layout, self.attention, members)
        no_history = why_no_slots(layout, scheduler, settings)
        if no_history:
            notes = (*notes, f"allocations and frees of slots are not recorded: {no_history}")
        pool = None if no_history else scheduler.kv_cache_manager.coordinator.block_pool
        sweep_every = settings.sweep_every if getattr(pool, "enable_caching", False) else 0
        described = describe_engine(runner, layout, notes, history=not no_history, sweep_every=sweep_every)
        header = begins(dataclasses.replace(described, role=role_of(runner.vllm_config, scheduler)))
        settings.folder.mkdir(parents=True, exist_ok=True)
        connector = connector_of(runner.vllm_config)
        self.on_device: DeviceSteps | None = None
        self.drafts: Any  # what records a draft's forwards
        path = settings.folder / trace_name("vllm", header, number)
        self.recorder: Any = begin_new(path, lambda path: self._begin_trace(path, header, settings, runner))
        recorder: Any = self.recorder
        self.requests = VllmRequests(header.tables[0].rows)
        self.identities = Identities(runner, self.requests, self._say)
        self.history: BlockHistory | None = None
        if not no_history:
            self.history = BlockHistory(scheduler, layout, self.requests, recorder, header.sweep_interval)
        if layout.draft is None or not isinstance(recorder, DeviceRecorder):
            self.drafts = DraftForwards(runner, layout, recorder, self.requests)
        self.external = ExternalLoads(connector, layout, self.requests, recorder, scheduler, members)
        self._results = StepResults(runner, recorder, self.requests, self.external)
        self.output: Any = None  # the scheduler's, of the step that is being executed
        self._step, self._open = 0, False
        self.forwards: list[tuple[int, tuple[str, ...]]] = []  # of the step, begun so far
        self._now: Step | None = None
        self._first = np.empty(0, np.int64)
        self._later: list[StepForward] = []
        self._prepared: DeviceStep | None = None  # a step of which not all is made yet that the model is given
        self._awaited = 0  # what of it: attention's metadata, positions
        self._ran: list[VllmRequest] = []  # the requests of the last step on the device
        self._requests_changed = False  # since that: one has come, gone, or has other tokens or another row
        for note in (*layout.notes, *notes):
            logger.info("kvcanary: %s", note)
        logger.info("%s", settings.start_up_line(self.recorder.path, self.recorder.header))

    def _begin_trace(
        self, path: Path, header: TraceHeader, settings: RecordingSettings, runner: Any
    ) -> Recorder | DeviceRecorder:
        """Return a recorder that never waits for the device, if there is one and it can be."""
        layout = self.layout
        options: dict[str, Any] = {"kv_sources": layout.kv.sources, "kv_watch_every": settings.kv_watch_every}
        options |= {"state_sources": layout.states.parts if settings.capture_bytes else {}} | settings.writer_options()
        if on_gpu(runner):
            why = why_it_waits(runner, layout)
            try:
                if not why:
                    recorder, self.on_device, self.drafts = begin_on_device(path, header, runner, layout, options)
                    return recorder
            except (ValueError, AttributeError) as error:
                why = str(error)
            note = f"every forward waits for the device: {why}"
            logger.warning("kvcanary: %s", note)
            header = layout.states.without(dataclasses.replace(header, notes=(*header.notes, note)), note)
        if not is_v1(runner):
            header = layout.unseen_of_v2(header)
        if on_gpu(runner):
            header, options["kv_sources"] = without_samples(header, layout.kv.sources)
        return recorder_class(settings.inject)(path, header, **options)

    def attach(self, on_fault: OnFault, on_history_fault: OnFault) -> None:
        """Hook this engine's own parts; `on_history_fault` is called when the slot history failed, which is over then."""

        def history_fault(hook: str, error: Exception) -> None:
            if not isinstance(error, EngineError):
                self.history = None
            on_history_fault(hook, error)

        self._history_fault: OnFault = history_fault
        self.layout.kv.attach(on_fault)
        self.layout.states.attach(self.recorder, on_fault)
        self.windows.attach(on_fault)
        self.outputs.attach(on_fault)
        if self.history is not None:
            self.history.attach(lambda hook: while_true(lambda: self.history is not None, hook), history_fault)
        self.external.attach(on_fault)
        self.drafts.attach(on_fault)
        self.identities.attach(on_fault)

    def see(self, name: str, prompt_len: int, request: Any) -> VllmRequest:
        """Return a request of the engine's; a new one is recorded."""
        known, new = self.requests.see(name)
        if new:
            self._requests_changed = True
            known.prompt_len = prompt_len
            self.identities.begin(known, request)
        return known

    def _say(self, known: VllmRequest) -> None:
        said: dict[str, Any] = {"name": known.name, "prompt_len": known.prompt_len, "identity": known.identity}
        self.recorder.request(request_id=known.request_id, **said)

    def begin_step(self, runner: Any, output: Any) -> None:
        """Record what the scheduler says of a step's requests."""
        self.output, self._step = output, self._step + 1
        self.forwards, self._later = [], []
        gone = getattr(output, "preempted_req_ids", None) or ()
        if self.history is None:  # else the scheduler's own functions have said it, in time
            for name in output.finished_req_ids:
                self.left(name, "finished")
            for name in gone:
                self.left(name, "retracted")
        record_copies(self.recorder, self.layout, getattr(output, "kv_cache_block_copies", None) or ())
        self.identities.begin_step()
        self.external.begin_step(output.num_scheduled_tokens)
        with self.requests.lock:
            for new in output.scheduled_new_reqs:
                self._begin_request(new.req_id, new, getattr(new, "prefill_token_ids", None))
            self._see_cached(output.scheduled_cached_reqs)
            names = output.num_scheduled_tokens
            found = self.requests.known(names)
            for name, known in zip(names, found, strict=True) if None in found else ():
                if known is None:  # running since before the recording began
                    self._begin_request(name, getattr(runner, "requests", {}).get(name))
                    self._pad(name, output)

    def _begin_request(self, name: str, request: Any, tokens: Any = None) -> None:
        self._requests_changed = True
        prompt, unknown = prompt_of(request)
        known = self.see(name, prompt.size, request)
        known.prompt_len, known.unknown = prompt.size, unknown
        goes_on = bool(known.row)
        if goes_on:  # a session, from what is computed of it: the engine has dropped what was sampled last
            self.identities.begin(known, request)
            self.recorder.request_status(request_id=known.request_id, status="admitted", row=known.row)
        known.begin(tokens or prompt)
        known.since = self.recorder.next_forward  # what is still on its way to it is dropped by the engine, too
        known.got_blocks(getattr(request, "block_ids", None), anew=True)
        if goes_on:
            forget_last(self.recorder, self.layout, known, int(getattr(request, "num_computed_tokens", 0)))

    def _pad(self, name: str, output: Any) -> None:
        """Have a request's list as long as its tokens are behind this step, but for those that it samples: unknown ones."""
        cached = output.scheduled_cached_reqs
        if name in cached.req_ids:
            drafts = (getattr(output, "scheduled_spec_decode_tokens", None) or {}).get(name, ())
            place = cached.req_ids.index(name)
            behind = cached.num_computed_tokens[place] + output.num_scheduled_tokens[name] - len(drafts)
            tokens = self.requests.see(name)[0].tokens
            tokens.append([UNKNOWN_TOKEN] * max(0, behind - len(tokens)))

    def _see_cached(self, cached: Any) -> None:
        """Take over the tokens that the scheduler sends along: of resumed requests, and to the ranks that do not sample."""
        resumed_ids, counts = cached.resumed_req_ids, getattr(cached, "num_output_tokens", None) or ()
        all_tokens, sent_tokens = getattr(cached, "all_token_ids", None) or {}, cached.new_token_ids
        all_blocks = (getattr(cached, "new_block_ids", None) or ()) if self.on_device is not None else ()
        found = self.requests.known(cached.req_ids)
        # A load that failed takes back what was sampled on top of it.
        each = zip(itertools.count(), found, counts, strict=False)
        less = {place for place, known, n in each if known is not None and known.prompt_len + n < known.tokens.count}
        if not (resumed_ids or all_tokens or sent_tokens or less) and not any(all_blocks):  # of most steps
            return
        for place, (name, known) in enumerate(zip(cached.req_ids, found, strict=True)):
            if known is None:
                continue
            resumed = name in resumed_ids
            if resumed:
                self._requests_changed = True
                if self.history is None and known.row:
                    self._give_row_back(known, "retracted")
                known.fresh = True
            if all_blocks and (resumed or all_blocks[place]):
                known.got_blocks(all_blocks[place], anew=resumed)
            tokens = all_tokens.get(name)
            if tokens is not None:
                self._requests_changed = True
                known.begin(tokens)
                if resumed:
                    known.since = self.recorder.next_forward
                continue
            if place in less:
                self._requests_changed = True
                known.cut(known.prompt_len + counts[place])
                if known.row:  # what was sampled for it is none of its tokens any more
                    self.recorder.request_status(request_id=known.request_id, status="admitted", row=known.row)
            sent = sent_tokens[place] if sent_tokens else ()
            if len(sent) and len(known.tokens) == cached.num_computed_tokens[place]:
                known.tokens.append(sent)

    def _running(self, names: Sequence[str]) -> list[VllmRequest]:
        """Return the requests of a step, each with a row."""
        running = [known for known in map(self.requests.get, names) if known is not None]
        if len(running) != len(names):
            raise ValueError("a request runs that the scheduler has not sent")
        for known in running:
            if self.requests.run(known, self._step):
                self.recorder.request_status(request_id=known.request_id, status="admitted", row=known.row)
        return running

    def positions(self, runner: Any, fed: Any) -> Any:
        """Return what the V1 runner's model is fed, `[dimensions, at least T]` or `[at least T]`, as one position a token."""
        if not self.layout.positions.places:
            return fed
        places = runner.positions[: int(self.output.total_num_scheduled_tokens)]
        return self._positions(fed, places, runner.query_start_loc.gpu, runner.input_batch.req_ids)

    def _positions(self, fed: Any, places: Any, starts: Any, names: Sequence[str]) -> Any:
        positions = self.layout.positions
        if self._requests_changed:
            positions.forget()
        return positions.of_step(fed, places, starts, names, self.requests.text_from)

    def prepared(self, step: DeviceStep) -> None:
        """Keep a step until all is there that the model is given; it is run after that."""
        self._prepared, self._awaited = step, 1 + self.layout.positions.seen

    def _has_come(self, step: DeviceStep) -> None:
        self._awaited -= 1
        if not self._awaited:
            self.capture(step)

    @around
    def on_inputs(self, batch: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Take over the positions that the V2 runner feeds its model, if they are of several dimensions."""
        inputs = yield
        step = self._prepared
        if step is not None and self.layout.positions.seen:
            places = step.positions[: step.num_tokens]
            step.positions = self._positions(inputs["positions"], places, batch.query_start_loc, step.names)
            self._has_come(step)

    def capture(self, step: DeviceStep) -> None:
        """Have the device capture a step that the model is about to run."""
        if self.on_device is None:
            return
        self._prepared = None
        running: list[VllmRequest] | None = None
        other = False
        if self.identities.looks:
            known_requests = [known for known in map(self.requests.get, step.names) if known is not None]
            other = self.identities.look(known_requests, step.extend.tolist())
        if other or self._requests_changed or not self.on_device.goes_on(step):
            for known in self._ran:  # the steps that went on with them have not said so
                if known.row and self.requests.get(known.name) is known:
                    self.requests.run(known, self._step - 1)
            self._ran = running = self._running(step.names)
            self._requests_changed = False
            self.external.before_device(step, self.output, running)
        self.forwards += self.on_device.before(step, running, self.attention, self.identities.others)
        for known in running or ():
            known.fresh = False
        self._open = True

    def before_model(self, step: Step) -> None:
        """Record the first forward of the step that the model is about to run, and keep the others for later."""
        running = self._running(step.names)
        self.external.before_model(step, self.output, running)
        self.identities.look(running, step.extend.tolist())
        forwards = self.layout.states.beside(forwards_of(step, self.layout.groups, running, self.requests), step)
        forwards = self.identities.beside(forwards)
        self.drafts.behind(step, running, forwards)
        self.layout.kv.take_submitted()  # what no forward has taken
        for known in running:
            known.fresh = False
        self._now, self._first, self._later = step, forwards[0][2], forwards[1:]
        self._open = True
        self.windows.begin(step)
        self.outputs.begin(step)
        self._begin(forwards[0], step.attention)

    def _begin(self, forward: StepForward, attention: Sequence[AttentionInput]) -> None:
        given, names, chosen = forward
        self.forwards.append((self.recorder.next_forward, names))
        self.recorder.before_forward(self.drafts.beside(given))
        for one in attention:
            self.recorder.attention(chosen_attention(one, chosen))

    def _end(self, step: Step | None, chosen: Any, given: Submitted, note: str, error: BaseException | None) -> None:
        """Complete a forward of a step's `chosen` requests, with what was `given` for the step's tokens."""
        said: dict[str, Any] = {"note": note, "failed": error is not None}
        if given and step is not None:  # on the host
            said["submitted"] = of_tokens(given, tokens_of(step.extend, chosen))
        self.recorder.after_forward(**said)

    @around
    def on_attention(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record what attention gets in the step that has begun, if its metadata are made after that: the V2 runner's."""
        metadata = yield
        if self._prepared is not None:
            self._prepared.given = metadata
            self._has_come(self._prepared)
            return
        step = self._now
        if self._open and step is not None:
            step.given = metadata
            step.attention = self._read_attention(step)

    def _read_attention(self, step: Step) -> tuple[AttentionInput, ...]:
        """Read what attention gets now, and record it if that is not known yet."""
        found = self.attention.read(step.given, step.prefix, step.extend, step.block_sizes)
        if same_attention(step.attention, found):
            return step.attention
        for given in found:
            self.recorder.attention(chosen_attention(given, self._first))
        return found

    def after_model(self, error: BaseException | None) -> None:
        """Complete the step's forwards, once; their tokens are sampled later."""
        note = "" if error is None else f"the model raised {self.recorder.error_text(error)}"
        step = self._now
        if self._prepared is not None:
            self._prepared = None
            self.recorder.lost("a step ran that was prepared otherwise than is known")
        if not self._open:
            return
        self._open = False
        attention: tuple[AttentionInput, ...] = ()
        if error is None and step is not None and step.attention:
            again = self._read_attention(step)  # what the metadata hold at the forward's end
            attention = again if again is step.attention else (*step.attention, *again)
        given: Submitted = {}
        if error is None and step is not None:
            given = self.layout.kv.take_submitted(dict(enumerate(step.written)))
        counts = {} if step is None else self.windows.counts(step.prefix)
        self.windows.begin(None)
        found, compared = self.outputs.take()
        self.outputs.begin(None)
        for forward, chosen in ((None, self._first), *((forward, forward[2]) for forward in self._later)):
            if forward is not None:
                self._begin(forward, attention)
            if counts:
                self.recorder.attention(chosen_counts(counts, chosen))
            if compared:
                self.recorder.attention(chosen_outputs(found, compared if forward is None else 0, chosen))
            self._end(step, chosen, given, note, error)
        self._now, self._later = None, []
        if self.layout.draft is None:
            self._filled()
        if self.history is not None:
            self.history.after_step(len(self.forwards))

    def after_drafts(self) -> None:
        """Hand over what a step has filled once the draft model, which runs behind the target, has filled it too."""
        if self.layout.draft is not None:
            self.drafts.end_step()
            self._filled()

    def _filled(self) -> None:
        if self.history is not None:
            try:
                self.history.after_forward()
            except Exception as error:  # noqa: BLE001  # the forwards go on without it
                self._history_fault("after_forward", error)

    def took_result(self, result: Any, on_fault: OnFault) -> None:
        """Record what a step sampled, now or when the engine fetches it."""
        if self.on_device is not None and not is_read(result):
            self.on_device.tell_of_waits(result)
        self._results.took(result, tuple(self.forwards), on_fault)

    def left(self, name: str, status: RequestStatus) -> None:
        """Record that a request has given its row back; it is forgotten unless it was retracted."""
        known = self.requests.get(name)
        if known is not None:
            self.external.left(name)
            self._give_row_back(known, status)
            if status != "retracted":
                self.requests.drop(known)

    def _give_row_back(self, known: VllmRequest, status: RequestStatus) -> None:
        self.recorder.request_status(request_id=known.request_id, status=status, row=known.row or -1)
        self.requests.give_row_back(known)
        self._requests_changed = True
