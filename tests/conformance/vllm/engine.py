"""Running vLLM for one configuration, in a process forked from one that has imported it all, or in a new one.

python engine.py '{"setup": "llama", "fault": "none", "seed": 1}' FOLDER
"""

import json
import os
import random
import sys
from pathlib import Path

from configurations import SETUPS, Run

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"

# Read while modules are imported, so set before the first import.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # one thread: a forked process must not wait for threads that it has not inherited
    "OMP_NUM_THREADS": "1",
}


def import_engine() -> None:
    """Import what an engine process needs, so that it can be forked instead of started anew."""
    from vllm import LLM  # noqa: F401
    from vllm.platforms import current_platform

    # A worker does this before it imports its runner; done after that, it stumbles over a module of llvmlite's.
    if hasattr(type(current_platform), "register_triton_kernel_overrides"):  # not before 0.31
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

    import vllm.model_executor.models.gemma3
    import vllm.model_executor.models.lfm2
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.mistral
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401


def run_forked(run: Run, folder: Path, timeout_s: float) -> int:
    """Run one configuration; its log, its output and its traces go into `folder`. Return the exit status."""
    import signal
    import subprocess
    import time

    folder.mkdir(parents=True)
    if SETUPS[run.setup].spawned:
        command = [sys.executable, __file__, json.dumps({"setup": run.setup, "fault": run.fault, "seed": run.seed})]
        command += [str(folder), *([] if run.recorded else ["--unrecorded"])]
        with (folder / "log").open("w") as log:
            # In a group of its own: the engine core and the worker must end with it.
            engine = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(run, folder), start_new_session=True
            )
        try:
            return engine.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()
            return -1
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(environment(run, folder))
            generate(run, folder)
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
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def environment(run: Run, folder: Path) -> dict[str, str]:
    """Return the environment of a run."""
    setup = SETUPS[run.setup]
    env = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(setup.spawned))}
    if run.recorded:
        env |= {"KVCANARY_TRACE": str(folder / "traces"), "KVCANARY_SWEEP_EVERY": str(setup.sweep)}
    if run.fault != "none":
        env |= {"CONFORMANCE_FAULT": run.fault, "CONFORMANCE_SEED": str(run.seed)}
        if setup.spawned:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE / "injected"), os.environ.get("PYTHONPATH"))))
    return env


def embedded(prompt: list[int], number: int) -> dict:
    """Return a prompt as tokens, as embeddings, or with its middle as embeddings, by turns."""
    import torch

    if number % 3 == 0:
        return {"prompt_token_ids": prompt}
    table = torch.randn(640, 96, generator=torch.Generator().manual_seed(7))  # the model's hidden size
    embeds = table[torch.tensor(prompt)]
    if number % 3 == 1:
        return {"prompt_embeds": embeds}
    are_tokens = [not len(prompt) // 3 <= i < len(prompt) // 2 for i in range(len(prompt))]
    return {"prompt_embeds": embeds, "prompt_token_ids": prompt, "prompt_is_token_ids": are_tokens}


def stored_in(place: Path, connector: dict) -> dict:
    """Return a connector's configuration with the folder of its files, its members' too."""
    extra = {"shared_storage_path": str(place), **connector.get("kv_connector_extra_config", {})}
    if "connectors" in extra:
        extra["connectors"] = [stored_in(place, member) for member in extra["connectors"]]
    return {**connector, "kv_connector_extra_config": extra}


def generate(run: Run, folder: Path) -> None:
    """Start the engine, generate from seeded random prompts, some of which share a prefix, and shut it down."""
    from faults import install_faults, mark_all
    from vllm import LLM, SamplingParams

    setup = SETUPS[run.setup]
    if not setup.spawned:
        install_faults()
    if setup.model == "mrope":
        import mrope

        mrope.register()
    if "lmcache" in run.setup:
        import lmcache_host

        lmcache_host.install(run.fault, mark_all)
    arguments = {
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "num_gpu_blocks_override": 64,
        **setup.arguments,
    }
    if "model" in arguments.get("speculative_config", {}):
        drafts = arguments["speculative_config"]
        arguments["speculative_config"] = {**drafts, "model": str(MODELS / drafts["model"])}
    if setup.connector is not None:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**stored_in(folder / "stored", setup.connector))
    llm = LLM(
        model=str(MODELS / setup.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        block_size=32,
        max_num_seqs=6,
        seed=run.seed,
        **{"max_num_batched_tokens": 48, "dtype": "float32", **arguments},
    )
    rng = random.Random(run.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 600) for _ in range(count)]

    shared = tokens(70)
    prompts = [shared + tokens(rng.randrange(3, 30)) if i % 2 == 0 else tokens(rng.randrange(5, 60)) for i in range(6)]
    again = [prompts[0] + tokens(4), tokens(9), shared[:66], prompts[2]]
    if run.setup.endswith("ngram"):
        again[1] = tokens(6) * 6  # something for the drafts to guess
    if setup.connector is not None:
        again += prompts
    outputs = []
    for number, batch in enumerate((prompts, again)):  # the later ones hit the prefix cache
        if number and setup.connector is not None:
            llm.reset_prefix_cache()  # so that the connector has something to load
        sampling = [
            SamplingParams(max_tokens=rng.randrange(12, 44), temperature=0, ignore_eos=True, detokenize=False)
            for _ in batch
        ]
        given = [{"prompt_token_ids": prompt} for prompt in batch]
        if setup.embeddings:
            given = [embedded(prompt, i) for i, prompt in enumerate(batch)]
        outputs += [list(o.outputs[0].token_ids) for o in llm.generate(given, sampling, use_tqdm=False)]
    (folder / "tokens.json").write_text(json.dumps(outputs))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    generate(Run(**json.loads(sys.argv[1]), recorded="--unrecorded" not in sys.argv), Path(sys.argv[2]))
