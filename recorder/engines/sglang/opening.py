"""What a trace of SGLang's says of itself at its start, and the recorder that writes it."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, Final

from ...capture.device.recorder import DeviceRecorder
from ...capture.recorder import Recorder
from ...process.settings import RecordingSettings
from ...trace.header import NotWatched, TraceHeader
from ..common.injecting import recorder_class
from ..common.sampled import without_samples
from .attention.windows import WindowReads
from .inside import InsideModels
from .layers import not_read
from .layout import SglangLayout, on_gpu
from .recurrent import without_states
from .submitted import SubmittedKv

logger = logging.getLogger("kvcanary")

# What `draft_steps` works out.
DERIVED_OF_DRAFTS: Final = ("prefix_lens", "input_ids", "positions", "out_cache_loc")


def without_unseen(
    header: TraceHeader,
    layout: SglangLayout,
    model_runners: list[Any],
    *,
    states: bool,
    submitted: SubmittedKv | None,
    windows: WindowReads | None,
) -> TraceHeader:
    """Return a header that says what of the runners is not looked at; without `states`, those of recurrent layers are not.

    `submitted` is what is looked at of what models hand to their pools, `windows` of what layers with a window read, None for
    nothing; on a host their layers are not hooked then.
    """
    entries, reason = [*header.not_watched], "what the model hands to the pool is not read"
    for index, runner in enumerate(header.runners):
        if header.streams(index) and (submitted is None or not submitted.watches(index)):
            entries.append(NotWatched(what="submitted", name=runner.name, reason=reason))
    if not states:
        header, unseen = without_states(header, "its layers are not hooked")  # where they are read
        entries += unseen
    if not on_gpu(layout.tables[0]):
        sees = windows.sees if windows is not None else None
        entries += not_read(model_runners, layout, sees)
    return dataclasses.replace(header, not_watched=tuple(entries))


def open_recorder(
    path: Path,
    header: TraceHeader,
    settings: RecordingSettings,
    layout: SglangLayout,
    model_runners: list[Any],
    inside: InsideModels,
) -> Recorder | DeviceRecorder:
    """Return a recorder that never waits for the device, if there is one and it can be."""
    options: dict[str, Any] = {"kv_sources": layout.sources, "kv_watch_every": settings.kv_watch_every}
    if header.states:
        options["state_sources"] = layout.state_parts if settings.capture_bytes else {}
    options |= settings.writer_options()
    if on_gpu(layout.tables[0]):
        derived = what_is_derived(header, model_runners, inside)
        try:
            return DeviceRecorder(path, derived, tables=layout.tables, luts=layout.luts, **options)
        except ValueError as error:
            note = f"every forward waits for the device: {error}"
            logger.warning("kvcanary: %s", note)
            header = dataclasses.replace(header, notes=(*header.notes, note))
            header, options["kv_sources"] = without_samples(header, layout.sources)
            if header.states:
                header, unseen = without_states(header, note)
                header = dataclasses.replace(header, not_watched=(*header.not_watched, *unseen))
                options.pop("state_sources")
    return recorder_class(settings.inject)(path, what_is_derived(header, model_runners, None), **options)


def what_is_derived(header: TraceHeader, model_runners: list[Any], inside: InsideModels | None) -> TraceHeader:
    """Return a header that says which columns of draft steps in CUDA graphs are derived; `inside` None: no graph is read."""
    runners, not_watched = list(header.runners), list(header.not_watched)
    for index, model_runner in enumerate(model_runners):
        eager = getattr(model_runner.server_args, "disable_cuda_graph", False)
        graphs = on_gpu(model_runner.req_to_token_pool.req_to_token) and not eager
        seen = inside is not None and not inside.off and inside.drafts_in_graphs(model_runner)
        if model_runner.is_draft_worker and graphs and not seen:
            runners[index] = dataclasses.replace(runners[index], derived=DERIVED_OF_DRAFTS)
            name = f"{runners[index].name}: steps in a CUDA graph"
            reason = "their positions, tokens and slots are worked out from what goes into the graph and comes out"
            not_watched.append(NotWatched(what="graph", name=name, reason=reason))
    return dataclasses.replace(header, runners=tuple(runners), not_watched=tuple(not_watched))
