"""Where vLLM is hooked. What this version of it lacks is left out, named in the log once and in the trace's header.

vLLM has no registry of hooks: the functions of its classes are wrapped when the process has imported their module.
"""

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from ..common.hooking import wrap_function
from ..common.import_hook import when_imported

logger = logging.getLogger("kvcanary")

RUNNER_V1: Final = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2: Final = "vllm.v1.worker.gpu.model_runner"
SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
PROCESSES: Final = "vllm.v1.utils"
GPU_WORKER: Final = "vllm.v1.worker.gpu_worker"
CPU_WORKER: Final = "vllm.v1.worker.cpu_worker"
MODULES: Final = (RUNNER_V1, RUNNER_V2, SCHEDULER, PROCESSES, GPU_WORKER, CPU_WORKER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function of vLLM's and the hook around it (`Attachment.on_<hook>`); an `essential` one must be there.

    `owner` is a class of the module, or nothing for a function of the module itself.
    """

    module: str
    owner: str
    name: str
    hook: str
    without: str
    essential: bool = False


def _runner(module: str, name: str, hook: str, without: str, *, essential: bool = False) -> Target:
    return Target(module=module, owner="GPUModelRunner", name=name, hook=hook, without=without, essential=essential)


def _scheduler(name: str, hook: str, without: str) -> Target:
    return Target(module=SCHEDULER, owner="Scheduler", name=name, hook=hook, without=without)


def _worker(module: str, owner: str) -> Target:
    without = "what the engine runs to warm up may be recorded as its first requests"
    return Target(module=module, owner=owner, name="compile_or_warm_up_model", hook="warm_up", without=without)


# Seen in 0.32.0; the V2 runner's were read off its source and are untested.
TARGETS: Final = (
    _runner(RUNNER_V1, "initialize_kv_cache", "runner", "nothing can be recorded", essential=True),
    _runner(RUNNER_V1, "execute_model", "execute", "nothing can be recorded", essential=True),
    _runner(RUNNER_V1, "_model_forward", "forward", "nothing can be recorded", essential=True),
    _runner(RUNNER_V1, "sample_tokens", "sample", "sampled tokens are not told"),
    _runner(RUNNER_V1, "shutdown", "shutdown", "a trace may be torn at the engine's exit (kvcanary recover)"),
    _runner(RUNNER_V2, "initialize_kv_cache", "runner", "nothing can be recorded", essential=True),
    _runner(RUNNER_V2, "execute_model", "execute", "nothing can be recorded", essential=True),
    _runner(RUNNER_V2, "prepare_attn", "prepared", "nothing can be recorded", essential=True),
    _runner(RUNNER_V2, "sample_tokens", "sample", "sampled tokens are not told"),
    _runner(RUNNER_V2, "shutdown", "shutdown", "a trace may be torn at the engine's exit (kvcanary recover)"),
    Target(
        module=PROCESSES,
        owner="",
        name="kill_process_tree",
        hook="kill",
        without="traces of an engine that is killed at its end are torn (kvcanary recover)",
    ),
    _worker(GPU_WORKER, "Worker"),
    _worker(CPU_WORKER, "CPUWorker"),
    _scheduler("__init__", "scheduler", "allocations and frees of slots are not told"),
    _scheduler("add_request", "add_request", "requests are told of when they first run"),
    _scheduler("_free_blocks", "free_blocks", "allocations and frees of slots are not told"),
    _scheduler("_preempt_request", "preempt", "allocations and frees of slots are not told"),
)

_installed: list[Any] = []


def install() -> None:
    """Set the hooks of this process, now and as it imports what is hooked; a second call does nothing.

    Raises:
        ValueError: a setting is wrong.
    """
    if _installed:
        return
    from ...process.environment import read_environment

    settings = read_environment()
    if settings is None:
        return
    from .attachment import Attachment

    attachment = Attachment(settings)
    _installed.append(attachment)
    when_imported({module: lambda found: hook_module(found, attachment) for module in MODULES})


def hook_module(module: ModuleType, attachment: Any) -> None:
    """Put the attachment's hooks around a module's functions; never raises."""
    try:
        targets = [target for target in TARGETS if target.module == module.__name__]
        missing = [target for target in targets if not callable(_find(module, target))]
        lacking = [target for target in missing if target.essential]
        for target in missing:
            place = ".".join(filter(None, (target.module, target.owner, target.name)))
            note = f"not hooked: {place}: {target.without}"
            logger.warning("kvcanary: %s", note)
            attachment.notes.append(note)
        if lacking:
            logger.error("kvcanary: not recording: this vLLM is not one that the adapter knows (0.32)")
            return
        for target in targets:
            if target not in missing:
                owner = getattr(module, target.owner) if target.owner else module
                wrap_function(owner, target.name, getattr(attachment, f"on_{target.hook}"), attachment.fault)
    except Exception:
        logger.exception("kvcanary: not recording: %s could not be hooked", getattr(module, "__name__", module))


def _find(module: ModuleType, target: Target) -> Any:
    return getattr(getattr(module, target.owner, None) if target.owner else module, target.name, None)
