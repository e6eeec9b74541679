"""Where SGLang is hooked, and what keeps a hook harmless: nothing that it raises gets into the engine.

SGLang's own registry (`sglang.srt.plugins.hook_registry`) puts the hooks around the engine's functions after all
plugins have been called. What this version of SGLang does not have is left out, named in the log once and in the
trace's header.
"""

import logging
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...errors import error_text
from ..common.hooking import harmless
from ..common.import_hook import when_imported
from ..common.stopping import stop_tree

if TYPE_CHECKING:
    from ...trace.header import NotWatched

logger = logging.getLogger("kvcanary")

# Not imported, when plugins are called, in the processes that run no scheduler: the server's own, the detokenizer's.
SCHEDULER_MODULE: Final = "sglang.srt.managers.scheduler"
UTILS_MODULE: Final = "sglang.srt.utils"

# What holds whole forwards as CUDA graphs; older versions have it otherwise.
FULL_GRAPHS: Final = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function of SGLang's: where it was in the versions known, newest first, and what is missing without it.

    An `essential` one must be there; one for `drafts` is looked for and missed only where there is a draft model.
    """

    name: str
    paths: tuple[str, ...]
    without: str
    essential: bool = False
    drafts: bool = False


# Seen in 0.5.13, 0.5.16 and 0.5.23.
TARGETS: Final = (
    Target(
        name="scheduler",
        paths=("sglang.srt.managers.scheduler.Scheduler.__init__",),
        without="nothing can be recorded",
        essential=True,
    ),
    Target(
        name="runner",
        paths=("sglang.srt.model_executor.model_runner.ModelRunner.__init__",),
        without="nothing can be recorded",
        essential=True,
    ),
    Target(
        name="model",
        paths=("sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",),
        without="nothing can be recorded",
        essential=True,
    ),
    Target(
        name="load",
        paths=("sglang.srt.model_executor.model_runner.ModelRunner.load_model",),
        without="forwards are taken down before and after the model, not inside its CUDA graphs",
    ),
    Target(
        name="capture",
        paths=(f"{FULL_GRAPHS}.capture_one",),
        without="forwards in CUDA graphs are taken down before and after the graph",
    ),
    Target(
        name="replay",
        paths=(f"{FULL_GRAPHS}.replay",),
        without="forwards in CUDA graphs are taken down before and after the graph",
    ),
    Target(
        name="run",
        paths=("sglang.srt.managers.scheduler.Scheduler.run_batch",),
        without="requests have no names and no truth tokens, sampled tokens are not told",
    ),
    Target(
        name="result",
        paths=("sglang.srt.managers.scheduler.Scheduler.process_batch_result",),
        without="sampled tokens are not told",
    ),
    Target(
        name="retract",
        paths=(
            "sglang.srt.managers.schedule_batch.release_req",
            "sglang.srt.managers.schedule_batch.ScheduleBatch.release_req",
            "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        ),
        without="a retracted request looks like an aborted one",
    ),
    Target(
        name="draft_graph",
        paths=(
            "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
            "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.replay",
        ),
        without="draft steps inside a CUDA graph are not recorded",
        drafts=True,
    ),
    Target(
        name="draft_extend_graph",
        paths=(
            "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
            "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.replay",
        ),
        without="draft extends inside a CUDA graph are not recorded",
        drafts=True,
    ),
    Target(
        name="stop",
        paths=("sglang.srt.utils.common.kill_process_tree", "sglang.srt.utils.kill_process_tree"),
        without="traces are torn at the engine's exit (recover them with kvcanary recover)",
    ),
)


def find(target: Target) -> str | None:
    """Return the path under which this SGLang has the target, None where it has not."""
    for path in target.paths:
        owner, _, attribute = path.rpartition(".")
        try:
            if callable(getattr(pkgutil.resolve_name(owner), attribute)):
                return path
        except (ImportError, AttributeError, ValueError):
            continue
    return None


class Stops:
    """The one hook of a process that records nothing, and ends those that do: the server's own."""

    cost = None

    def fault(self, _: str, error: Exception) -> None:
        """Take note of a hook that failed."""
        logger.error("kvcanary: processes are killed unprepared: %s", error_text(error), exc_info=error)

    def on_stop(self, *args: Any, **kwargs: Any) -> None:
        """Let the processes that are about to be killed end their traces first."""
        stop_tree(*args, **kwargs)


def install() -> None:
    """Hook SGLang in this process: a scheduler's work, and in every process what kills others.

    Raises:
        ValueError: a setting is wrong, or this SGLang lacks something without which nothing can be recorded.
    """
    from ...process.environment import read_environment

    settings = read_environment()
    if settings is None:
        return
    if SCHEDULER_MODULE not in sys.modules:
        later = UTILS_MODULE not in sys.modules  # than SGLang's registry, which sets what is there by itself
        when_imported({UTILS_MODULE: lambda _: _hook_stops(apply=later)})
        return
    from .attachment import Attachment

    attachment = Attachment(settings)
    for entry in register([target for target in TARGETS if not target.drafts], attachment):
        logger.warning("kvcanary: %s: %s", entry.name, entry.reason)
        attachment.not_watched.append(entry)


def _hook_stops(*, apply: bool) -> None:
    """Hook what kills other processes; never raises."""
    try:
        for note in register([target for target in TARGETS if target.name == "stop"], Stops()):
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

    found = {target: find(target) for target in targets}
    lacking = [target.paths[0] for target, path in found.items() if path is None and target.essential]
    if lacking:
        raise ValueError(f"this SGLang has no {', '.join(lacking)}; the adapter knows versions 0.5.13 to 0.5.23")
    for target, path in found.items():
        if path is not None:
            hook = getattr(attachment, f"on_{target.name}")
            HookRegistry.register(path, harmless(hook, attachment.fault, attachment.cost), HookType.AROUND)
    return [_not_hooked(target.paths[0], target.without) for target, path in found.items() if path is None]


def _not_hooked(path: str, without: str) -> "NotWatched":
    from ...trace.header import NotWatched  # which a process without a scheduler need not load

    return NotWatched(what="other", name=f"not hooked: {path}", reason=without)


def register_drafts(attachment: Any) -> "list[NotWatched]":
    """Hook what only a draft model uses, in a process that turns out to have one; as `register`."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = register([target for target in TARGETS if target.drafts], attachment)
    HookRegistry.apply_hooks()
    return missing


def not_applied() -> "list[NotWatched]":
    """Return what was found but not hooked by SGLang's registry, which logs why."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    known = {path: target.without for target in TARGETS for path in target.paths}
    applied = getattr(HookRegistry, "_patched", known)
    hooked = getattr(HookRegistry, "_hooks", ())
    return [_not_hooked(path, known[path]) for path in hooked if path in known and path not in applied]
