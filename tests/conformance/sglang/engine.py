"""Running SGLang for one configuration, in a process forked from one that has imported it all."""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configurations import FAULTS, Configuration
from inside import INSIDE, damage

MODELS = Path(__file__).parent / "models"

# Read while modules are imported, so set before the first import.
ENVIRONMENT = {
    "SGLANG_STANDIN": "cpu",
    "SGLANG_STANDIN_CANARY": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # one thread: a forked process must not wait for threads that it has not inherited
    "OMP_NUM_THREADS": "1",
}

# What all engines here are started with, small enough for a core.
CPU_ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "mem_fraction_static": 0.1,
    "disable_cuda_graph": True,
    "max_running_requests": 8,
    "chunked_prefill_size": 32,
    "log_level": "info",
}


def import_engine() -> None:
    """Import what a scheduler process needs, and let it be forked instead of started anew."""
    import contextlib
    import multiprocessing

    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.models.llama
    import sglang.srt.models.registry

    with contextlib.suppress(ModuleNotFoundError):  # before 0.5.13 there is none
        import sglang.srt.kv_canary.api  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None


def run_forked(configuration: Configuration, folder: Path, timeout_s: float) -> int:
    """Run one configuration; its log, the canary's ring and the traces go into `folder`. Return the exit status."""

    def run() -> None:
        note_violations(folder / "ring")
        if configuration.fault in INSIDE:
            damage(configuration.fault, FAULTS[configuration.fault][0], configuration.seed)
        if configuration.retracts:
            retract_now_and_then()
        generate(configuration)

    environment = {**configuration.environment(), "KVCANARY_TRACE": str(folder / "traces")}
    return forked(folder, environment, run, timeout_s)


def forked(folder: Path, environment: dict[str, str], run: Callable[[], None], timeout_s: float) -> int:
    """Call `run` in a process of its own, in a group of its own, with its log in `folder`; return the exit status."""
    import signal
    import time

    folder.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(environment)
            run()
            status = 0
        except BaseException:  # noqa: BLE001  # told, whatever it is
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.2)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def note_violations(path: Path) -> None:
    """Write down, after each of the canary's steps, what it has found since the last, and how many slots it has looked at.

    Its log has the same rows, but a step late, and none of the very last step.
    """
    from sglang.srt.kv_canary.runner.violation_manager import ViolationManager

    step, seen = ViolationManager.step, [0]

    def noting_step(self: ViolationManager) -> None:
        log = self._device_state.violation_log
        end = int(log.violation_write_index.item())
        line = {
            "step": self._outer_step_counter_getter() - 1,
            "rows": log.violation_ring[seen[0] : end].tolist(),
            "counters": self._device_state.slot_run_counters.tolist(),
        }
        seen[0] = end
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        step(self)

    ViolationManager.step = noting_step


def retract_now_and_then() -> None:
    """Turn on SGLang's own switch for testing retraction, which it reads when it is imported."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = True
    scheduler.TEST_RETRACT_INTERVAL = 7


def generate(configuration: Configuration) -> None:
    """Start the engine, generate from seeded random prompts, some of which share a prefix, and shut it down."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=str(MODELS / configuration.model),
        **CPU_ENGINE,
        disable_overlap_schedule=not configuration.overlap,
        page_size=configuration.page_size,
        max_total_tokens=configuration.max_total_tokens,
        random_seed=configuration.seed,
        kv_canary="log",
        kv_canary_real_data="partial",
        kv_canary_sweep_interval=configuration.sweep_interval,
    )
    rng = random.Random(configuration.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    shared = tokens(20)
    prompts = [(shared if i % 2 == 0 else []) + tokens(rng.randrange(5, 40)) for i in range(5)]
    prompts.append(prompts[0][:28] + tokens(9))
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    for batch in (prompts[:4], prompts[4:]):  # the later ones hit the prefix cache
        for output in engine.generate(input_ids=batch, sampling_params=sampling):
            print("generated", output["output_ids"], "cached", output["meta_info"].get("cached_tokens"), flush=True)
    engine.shutdown()
