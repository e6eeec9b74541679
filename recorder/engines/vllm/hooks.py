"""Where vLLM is hooked. What this version of it lacks is left out, named in the log once and in the trace's header.

vLLM has no registry of hooks: the functions of its classes are wrapped when the process has imported their module.
"""

import logging
from types import ModuleType
from typing import Any, Final

from ..common.hooking import Target, when_imported, wrap_function

logger = logging.getLogger("kvcanary")

RUNNER_V1: Final = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2: Final = "vllm.v1.worker.gpu.model_runner"
SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
PROCESSES: Final = "vllm.v1.utils"
GPU_WORKER: Final = "vllm.v1.worker.gpu_worker"
CPU_WORKER: Final = "vllm.v1.worker.cpu_worker"
MODULES: Final = (RUNNER_V1, RUNNER_V2, SCHEDULER, PROCESSES, GPU_WORKER, CPU_WORKER)

_NOTHING: Final = "nothing can be recorded"
_NO_SAMPLES: Final = "sampled tokens are not recorded"
_NO_HISTORY: Final = "allocations and frees of slots are not recorded"
_TORN: Final = "a trace may be torn at the engine's exit (kvcanary recover)"
_WARM_UP: Final = "what the engine runs to warm up may be recorded as its first requests"
_V1, _V2, _SCHEDULER = f"{RUNNER_V1}:GPUModelRunner", f"{RUNNER_V2}:GPUModelRunner", f"{SCHEDULER}:Scheduler"

# Seen in 0.19.1 (without `shutdown`) to 0.33.0.
TARGETS: Final = (
    *(Target("runner", _NOTHING, (f"{runner}.initialize_kv_cache",), essential=True) for runner in (_V1, _V2)),
    *(Target("execute", _NOTHING, (f"{runner}.execute_model",), essential=True) for runner in (_V1, _V2)),
    Target("forward", _NOTHING, (f"{_V1}._model_forward",), essential=True),
    Target("prepared", _NOTHING, (f"{_V2}.prepare_attn",), essential=True),
    *(Target("sample", _NO_SAMPLES, (f"{runner}.sample_tokens",)) for runner in (_V1, _V2)),
    *(Target("shutdown", _TORN, (f"{runner}.shutdown",)) for runner in (_V1, _V2)),
    Target("kill", _TORN, (f"{PROCESSES}:kill_process_tree",)),
    Target("warm_up", _WARM_UP, (f"{GPU_WORKER}:Worker.compile_or_warm_up_model",)),
    Target("warm_up", _WARM_UP, (f"{CPU_WORKER}:CPUWorker.compile_or_warm_up_model",)),
    Target("scheduler", _NO_HISTORY, (f"{_SCHEDULER}.__init__",)),
    Target("add_request", "requests are recorded when they first run", (f"{_SCHEDULER}.add_request",)),
    Target("free_blocks", _NO_HISTORY, (f"{_SCHEDULER}._free_blocks",)),
    Target("preempt", _NO_HISTORY, (f"{_SCHEDULER}._preempt_request",)),
)

attachments: list[Any] = []  # of this process: none or one


def install() -> None:
    """Set the hooks of this process, now and as it imports what is hooked; a second call does nothing.

    Raises:
        ValueError: a setting is wrong.
    """
    if attachments:
        return
    from ..common.attachment import settings_here

    settings = settings_here()
    if settings is None:
        return
    from .attachment import VllmAttachment

    attachment = VllmAttachment(settings)
    attachments.append(attachment)
    when_imported({module: lambda found: hook_module(found, attachment) for module in MODULES})


def hook_module(module: ModuleType, attachment: Any) -> None:
    """Put the attachment's hooks around a module's functions; never raises."""
    try:
        found, lacking = [], False
        for target in TARGETS:
            where, _, path = target.paths[0].partition(":")
            if where != module.__name__:
                continue
            owner_name, _, name = path.rpartition(".")
            owner = getattr(module, owner_name, None) if owner_name else module
            if callable(getattr(owner, name, None)):
                found.append((owner, name, f"on_{target.hook}"))
                continue
            note = f"not hooked: {target.paths[0].replace(':', '.')}: {target.without}"
            logger.warning("kvcanary: %s", note)
            attachment.notes.append(note)
            lacking |= target.essential
        if lacking:
            logger.error("kvcanary: not recording: this vLLM is not one that the adapter knows (0.19 to 0.33)")
            return
        for owner, name, hook in found:
            wrap_function(owner, name, getattr(attachment, hook), attachment.fault)
    except Exception:
        logger.exception("kvcanary: not recording: %s could not be hooked", getattr(module, "__name__", module))
