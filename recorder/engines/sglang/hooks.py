"""Where SGLang is hooked, and what keeps a hook harmless: nothing that it raises gets into the engine.

SGLang's own registry (`sglang.srt.plugins.hook_registry`) puts the hooks around the engine's functions after all
plugins have been called. What this version of SGLang does not have is left out, named in the log once and in the
trace's header.
"""

import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from ...errors import error_text
from ..common.hooking import Target, harmless, when_imported
from ..common.stopping import stop_tree

if TYPE_CHECKING:
    from ...trace.header import NotWatched

logger = logging.getLogger("kvcanary")

# Not imported, when plugins are called, in the processes that run no scheduler: the server's own, the detokenizer's.
SCHEDULER_MODULE: Final = "sglang.srt.managers.scheduler"
UTILS_MODULE: Final = "sglang.srt.utils"

# What holds whole forwards as CUDA graphs; older versions have it otherwise.
FULL_GRAPHS: Final = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend"


_NOTHING: Final = "nothing can be recorded"
_NOT_INSIDE: Final = "forwards are recorded before and after the model, not inside its CUDA graphs"
_NO_NAMES: Final = "requests have no names and no truth tokens, sampled tokens are not recorded"
_TORN: Final = "traces are torn at the engine's exit (recover them with kvcanary recover)"
_OUTSIDE: Final = "forwards in CUDA graphs are recorded before and after the graph"
_OLD_WEIGHTS: Final = "what was computed before the weights change so is taken for the new ones'"
_UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_SCHEDULER: Final = f"{SCHEDULER_MODULE}:Scheduler"
_RUNNER: Final = "sglang.srt.model_executor.model_runner:ModelRunner"
_BATCHES: Final = "sglang.srt.managers.schedule_batch"
_RETRACT: Final = tuple(
    f"{_BATCHES}:{path}" for path in ("release_req", "ScheduleBatch.release_req", "ScheduleBatch.retract_decode")
)
_IN_GRAPH: Final = "inside a CUDA graph are not recorded"
_DRAFTS: Final = "sglang.srt.speculative.eagle_draft"
_STEPS: Final = f"{_DRAFTS}_cuda_graph_runner:EAGLEDraftCudaGraphRunner"
_EXTEND: Final = f"{_DRAFTS}_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner"

# Seen in 0.5.11 to 0.5.23.
TARGETS: Final = (
    Target("scheduler", _NOTHING, (f"{_SCHEDULER}.__init__",), essential=True),
    Target("runner", _NOTHING, (f"{_RUNNER}.__init__",), essential=True),
    Target("model", _NOTHING, (f"{_RUNNER}._forward_raw",), essential=True),
    Target("load", _NOT_INSIDE, (f"{_RUNNER}.load_model",)),
    Target("capture", _OUTSIDE, (f"{FULL_GRAPHS}.capture_one",)),
    Target("replay", _OUTSIDE, (f"{FULL_GRAPHS}.replay",)),
    Target("run", _NO_NAMES, (f"{_SCHEDULER}.run_batch",)),
    Target("result", "sampled tokens are not recorded", (f"{_SCHEDULER}.process_batch_result",)),
    Target("retract", "a retracted request looks like an aborted one", _RETRACT),
    Target("draft_graph", f"draft steps {_IN_GRAPH}", (f"{_STEPS}.execute", f"{_STEPS}.replay"), drafts=True),
    Target(
        "draft_extend_graph", f"draft extends {_IN_GRAPH}", (f"{_EXTEND}.execute", f"{_EXTEND}.replay"), drafts=True
    ),
    *(
        Target(
            "weights",
            _OLD_WEIGHTS,
            tuple(
                f"{owner}_weights_from_{where}"
                for owner in (f"{_UPDATER}.load", f"{_UPDATER}.update", f"{_RUNNER}.update")
            ),
        )
        for where in ("disk", "tensor", "ipc", "distributed")
    ),
    Target("stop", _TORN, (f"{UTILS_MODULE}.common:kill_process_tree", f"{UTILS_MODULE}:kill_process_tree")),
)


def install() -> None:
    """Hook SGLang in this process: a scheduler's work, and in every process what kills others.

    Raises:
        ValueError: a setting is wrong, or this SGLang lacks something without which nothing can be recorded.
    """
    from ..common.attachment import settings_here

    settings = settings_here()
    if settings is None:
        return
    if SCHEDULER_MODULE not in sys.modules:
        later = UTILS_MODULE not in sys.modules  # than SGLang's registry, which sets what is there by itself
        when_imported({UTILS_MODULE: lambda _: _hook_stops(apply=later)})
        return
    from .attachment import SglangAttachment

    attachment = SglangAttachment(settings)
    for entry in register([target for target in TARGETS if not target.drafts], attachment):
        logger.warning("kvcanary: %s: %s", entry.name, entry.reason)
        attachment.not_watched.append(entry)
    if settings.oracle:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_dotted(f"{_RUNNER}.sample"), attachment.around_sample, HookType.AROUND)


def _hook_stops(*, apply: bool) -> None:
    """Hook what kills other processes, in one that records nothing: the server's own; never raises."""

    def fault(_: str, error: Exception) -> None:
        logger.error("kvcanary: processes are killed unprepared: %s", error_text(error), exc_info=error)

    try:
        stops = SimpleNamespace(on_stop=stop_tree, fault=fault, cost=None)
        for note in register([target for target in TARGETS if target.hook == "stop"], stops):
            logger.warning("kvcanary: %s", note)
        if apply:
            from sglang.srt.plugins.hook_registry import HookRegistry

            HookRegistry.apply_hooks()
    except Exception:
        logger.exception("kvcanary: the engine's processes are killed unprepared")


def register(targets: Sequence[Target], attachment: Any) -> "list[NotWatched]":
    """Have SGLang's registry put the attachment's hooks around these targets; return what could not be hooked.

    Raises:
        ValueError: an essential target is not there.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    found = {target: target.find() for target in targets}
    lacking = [_dotted(target.paths[0]) for target, path in found.items() if path is None and target.essential]
    if lacking:
        raise ValueError(f"this SGLang has no {', '.join(lacking)}; the adapter knows versions 0.5.11 to 0.5.23")
    for target, path in found.items():
        if path is not None:
            hook = harmless(getattr(attachment, f"on_{target.hook}"), attachment.fault, attachment.cost)
            HookRegistry.register(_dotted(path), hook, HookType.AROUND)
    return [_not_hooked(target, target.paths[0]) for target, path in found.items() if path is None]


def _dotted(path: str) -> str:
    return path.replace(":", ".")


def _not_hooked(target: Target, path: str) -> "NotWatched":
    from ...trace.header import NotWatched  # which a process without a scheduler need not load

    return NotWatched(what="other", name=f"not hooked: {_dotted(path)}", reason=target.without)


def register_drafts(attachment: Any) -> "list[NotWatched]":
    """Hook what only a draft model uses, in a process that turns out to have one; as `register`."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = register([target for target in TARGETS if target.drafts], attachment)
    HookRegistry.apply_hooks()
    return missing


def not_applied() -> "list[NotWatched]":
    """Return what was found but not hooked by SGLang's registry, which logs why."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    known = {_dotted(path): target for target in TARGETS for path in target.paths}
    applied = getattr(HookRegistry, "_patched", known)
    hooked = getattr(HookRegistry, "_hooks", ())
    return [_not_hooked(known[path], path) for path in hooked if path in known and path not in applied]
