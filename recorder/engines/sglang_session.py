"""One scheduler's recording: what its forwards, requests and slots mean in the recorder's words."""

import dataclasses
import functools
import logging
import os
import time
import weakref
from typing import Any, Final

from ..device.recorder import DeviceRecorder
from ..environment import RecordingSettings
from ..forward_input import translate
from ..header import TraceHeader
from ..host_arrays import Int64Array, own_int64
from ..recorder import Recorder
from ..recording import beginning
from .sglang_batches import KnownBatch, KnownBatches
from .sglang_device import Telling
from .sglang_forward import forward_input
from .sglang_history import GroupHistory
from .sglang_layout import Layout, RunnerLayout, describe_engine
from .sglang_requests import KnownRequest, RequestBook, row_of
from .sglang_sweep import PrefixCacheWalk
from .sglang_transfers import Transfers, room_of

logger = logging.getLogger("kvcanary")

# Forwards whose samples may still be outstanding: overlap scheduling is one behind, pipelines a few.
MAX_OUTSTANDING: Final = 64

# A step's result, by weak reference, its forward's number and requests. The reference tells a result from a later one
# at the same address, and keeps no tensor alive.
Ran = tuple[weakref.ref[Any], int, KnownBatch]


class Session:
    """Records one `Scheduler` and its model runners into one trace.

    Methods may raise: the hooks that call them catch it.
    """

    def __init__(
        self, scheduler: Any, model_runners: list[Any], settings: RecordingSettings, notes: tuple[str, ...]
    ) -> None:
        self.target: Any = next((runner for runner in model_runners if not runner.is_draft_worker), None)
        if self.target is None:
            raise ValueError("this process has no target model runner")
        self.layout = Layout(model_runners, settings)
        header = describe_engine(scheduler, self.layout, self.target, settings, notes)
        self._requests = RequestBook(exact_ids=header.oracle is not None)
        tree_cache = scheduler.tree_cache  # what this version does not have shows before there is a file
        settings.folder.mkdir(parents=True, exist_ok=True)
        path = settings.folder / trace_name(header)
        self.recorder = self._open(path, header, settings)
        with beginning(self.recorder):
            self.sweep = PrefixCacheWalk(self.target, tree_cache, self.layout, header.sweep_interval, self.recorder)
        self.transfers = Transfers(self.layout, self.recorder)
        self.histories: list[GroupHistory] = []
        self.retracting = False
        self._batches = KnownBatches(self._requests)
        self._telling = Telling(self.recorder) if isinstance(self.recorder, DeviceRecorder) else None
        self._reqs: list[Any] = []
        self._last_target: tuple[int, KnownBatch] | None = None
        self.last_forward = ("", 0)  # the target's, its mode and requests
        self._results: dict[int, Ran] = {}  # by id, oldest first
        self._moment = 0  # between two, the scheduler appends no token to any request's
        logger.info("%s", settings.start_up_line(path, self.recorder.header))

    def _open(self, path: Any, header: TraceHeader, settings: RecordingSettings) -> Recorder | DeviceRecorder:
        """Return a recorder that never waits for the device, where there is one and it can be."""
        sources, every = self.layout.sources, settings.kv_watch_every
        # Slots that an allocator on the device gives out can only be told by waiting for it, and so in its order.
        if on_gpu(self.layout.tables[0]) and settings.history != "on":
            try:
                return DeviceRecorder(
                    path,
                    header,
                    tables=self.layout.tables,
                    luts=self.layout.luts,
                    kv_sources=sources,
                    kv_watch_every=every,
                    **settings.writer_options(),
                )
            except ValueError as error:
                note = f"every forward waits for the device: {error}"
                logger.warning("kvcanary: %s", note)
                header = dataclasses.replace(header, notes=(*header.notes, note))
        return Recorder(path, header, kv_sources=sources, kv_watch_every=every, **settings.writer_options())

    def cost(self) -> dict[str, int]:
        """Return what the recording has cost so far: forwards, and memory on the device and pinned on the host."""
        recorder = self.recorder
        if isinstance(recorder, DeviceRecorder):
            memory = {"device_bytes": recorder.device_bytes, "pinned_bytes": recorder.pinned_bytes}
        else:
            memory = {}
        return {"forwards": recorder.next_forward, **memory}

    def own(self, values: Any) -> Any:
        """Return a copy of a tensor of the engine's that may be read later: on the device, or flat on the host."""
        return values.clone() if isinstance(self.recorder, DeviceRecorder) else own_int64(values)

    def keep_history(self, allocator: Any) -> None:
        """Find the allocators behind the groups; slots that they give out are told from now on."""
        for kind, part in _allocators(allocator):
            groups = tuple(runner.groups[kind] for runner in self.layout.runners.values() if kind in runner.groups)
            if groups:
                num_slots = max(self.layout.groups[group].num_slots for group in groups)
                self.histories.append(GroupHistory(part, groups, num_slots, self.recorder))

    def see(self, req: Any) -> KnownRequest:
        """Return a request of the engine's; a new one is told of."""
        known, new = self._requests.see(req)
        if new:
            self.recorder.request(
                request_id=known.request_id,
                name=req.rid,
                prompt_len=len(req.origin_input_ids),
                room=room_of(req),
            )
        return known

    def before_model(self, runner: Any, batch: Any) -> None:
        """Tell of the forward that a model runner is about to run.

        Raises:
            ValueError: a batch that cannot be recorded.
        """
        layout = self.layout.runners[id(runner)]
        rows = batch.req_pool_indices.numel()
        known = self._batches.of(batch.rids, rows)
        if layout.sampled:
            self.last_forward = (batch.forward_mode, rows)
        if getattr(batch, "spec_info", batch) is not None:  # a speculative worker may append what it has verified
            self._moment += 1
        if self._telling is not None:
            lens = known.output_lens(self._moment)
            number = self._telling.tell(batch, runner=layout, known=known, truth_lens=lens)
        else:
            number = self.recorder.next_forward
            self._tell_on_host(self.recorder, batch, layout, known)
        if layout.sampled:
            self._last_target = (number, known)

    def _tell_on_host(self, recorder: Any, batch: Any, layout: RunnerLayout, known: KnownBatch) -> None:
        told = forward_input(
            batch,
            runner=layout,
            layout=self.layout,
            request_ids=known.ids,
            truth=self._requests.truth(known.rids, known.rows),
        )
        for history in self.histories:
            self._tell_written(history, layout, told)
        recorder.before_forward(told)

    def _tell_written(self, history: GroupHistory, layout: RunnerLayout, told: Any) -> None:
        for number in layout.groups.values():
            if number in history.groups:
                lut = self.layout.groups[number].lut
                slots = translate(told.luts[lut] if lut >= 0 else None, told.out_cache_loc[layout.table])
                history.written(slots, told.req_pool_indices, told.request_ids, told.extend_lens)

    def after_model(self, _: Any, error: BaseException | None) -> None:
        """Complete the forward; its tokens are sampled later."""
        note = "" if error is None else f"the model raised {type(error).__name__}: {error}"
        if isinstance(self.recorder, DeviceRecorder):
            self.recorder.after(note)
        else:
            self.recorder.after_forward(note=note)

    def runs(self, reqs: list[Any]) -> None:
        """Get to know the requests of a step that begins."""
        if reqs != self._reqs:
            for req in reqs:
                self.see(req)
            self._reqs = list(reqs)
        self._last_target = None

    def ran(self, result: Any, _: BaseException | None) -> None:
        """Note which forward a scheduler step's result belongs to."""
        last = self._last_target
        if result is None or last is None:
            return
        self._results[id(result)] = (weakref.ref(result), *last)
        if len(self._results) > MAX_OUTSTANDING:
            del self._results[next(iter(self._results))]

    def takes_result(self, result: Any) -> tuple[Ran, list[int]] | None:
        """Return what is known of a result that the scheduler is about to take over, and how many tokens each request has.

        A pipeline stage takes over results that are not those of its own forwards: nothing is known of them.
        """
        ran = self._results.pop(id(result), None)
        moment = self._moment
        self._moment = moment + 1
        if ran is None or ran[0]() is not result:
            return None
        return ran, ran[2].output_lens(moment)

    def took_result(self, ran: Ran, before: list[int]) -> None:
        """Tell which tokens the scheduler took over from a result; `before[i]` is how many request i had."""
        _, forward, known = ran
        after = known.output_lens(self._moment)
        if after == before:
            return
        sampled = functools.partial(self._sampled, known, before, after)
        if isinstance(self.recorder, DeviceRecorder):
            self.recorder.sampled_later(forward, sampled)
            return
        tokens, lens = sampled()
        self.recorder.sampled(forward=forward, sampled_tokens=tokens, sampled_lens=lens)

    def _sampled(self, known: KnownBatch, before: list[int], after: list[int]) -> tuple[Int64Array, Int64Array]:
        self._batches.refresh()
        return known.sampled(before, after)

    def got_row(self, req: Any) -> None:
        """Tell that a request was given a row."""
        self.recorder.request_status(request_id=self.see(req).request_id, status="admitted", row=row_of(req))

    def gave_row_back(self, req: Any, row: int) -> None:
        """Tell what became of a request whose row is free again."""
        known = self.see(req)
        self.transfers.forget(req)
        if req.finished():
            reason = type(req.finished_reason).__name__
            status = "aborted" if "ABORT" in reason else "finished"
            self._requests.drop(req)
        else:
            status, reason = ("retracted", "") if self.retracting else ("aborted", "row freed before the end")
        self.recorder.request_status(request_id=known.request_id, status=status, row=row, note=reason)
        if status == "retracted" and self.recorder.header.role == "decode":
            self.recorder.lost("a decode engine restores a retracted request's KV from the host, which is not told")


def trace_name(header: Any) -> str:
    """Return the name of a process's trace: when, role, ranks and process, so that no two are the same."""
    ranks = header.ranks
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    role = f"-{header.role}" if header.role else ""
    return f"sglang-{when}{role}-dp{ranks.dp_rank}-pp{ranks.pp_rank}-tp{ranks.tp_rank}-{os.getpid()}.arrow"


def _allocators(allocator: Any) -> list[tuple[str, Any]]:
    """Return `(kind, allocator)` of the pools behind an allocator."""
    swa = getattr(allocator, "swa_attn_allocator", None)
    if swa is None:
        return [("full", allocator)]
    full = allocator.full_attn_allocator
    return [("swa", swa)] if full is swa else [("full", full), ("swa", swa)]


def on_gpu(tensor: Any) -> bool:
    """Say whether a tensor lies on a GPU."""
    return getattr(getattr(tensor, "device", None), "type", "") == "cuda"


def on_host(allocator: Any) -> bool:
    """Say whether an allocator's tensors lie in the host's memory."""
    pages = getattr(_allocators(allocator)[0][1], "free_pages", None)
    return pages is not None and getattr(getattr(pages, "device", None), "type", "") == "cpu"
