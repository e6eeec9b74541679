"""What recording costs a decode step: engines of one shape beside one another on a GPU, which take turns.

overhead.py FOLDER NUMBER COUNT RUN: engine NUMBER of COUNT, RUN as in engine.py. It waits for the file FOLDER/go and for
its turn; each turn times a short and a long generation off the same cached prompts.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from engine import engine_of, environment  # noqa: E402

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 32, "vocab_size": 512,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
HOOKS = ("begin_step", "capture", "after_model", "before_model")
REQUESTS, PROMPT, SHORT, LONG, ROUNDS = 32, 512, 8, 136, 14

seconds: Counter[str] = Counter()
calls: Counter[str] = Counter()


def timed(owner: object, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
    """Take the time of a method of the recorder's."""
    original = getattr(owner, name)

    def timing(*args: object, **kwargs: object) -> object:
        began = clock()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[name] += clock() - began
            calls[name] += 1

    setattr(owner, name, timing)


def main() -> None:
    folder, number, count, run = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    place = folder / run["name"]
    os.environ.update(environment(run, place) | {"OMP_NUM_THREADS": "2"} | run.get("more", {}))
    model = place / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    from vllm import SamplingParams

    more = {
        "max_model_len": 2048,
        "max_num_seqs": REQUESTS,
        "max_num_batched_tokens": 4096,
        "num_gpu_blocks_override": None,
    }
    llm = engine_of(run, model=str(model), kv_cache_memory_bytes=7 << 29, **more)
    if run["base"]:
        from kvcanary.recorder.capture.device.background import Background
        from kvcanary.recorder.engines.vllm.recording import VllmRecording
        from kvcanary.recorder.engines.vllm.results import StepResults

        for name in HOOKS:
            timed(VllmRecording, name)
        timed(StepResults, "sampled")
        timed(Background, "_record_waiting", time.thread_time)
    rng = random.Random(1)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 500) for _ in range(PROMPT)]} for _ in range(REQUESTS)]
    tokens = []

    def generate(length: int) -> float:
        sampling = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        return took

    generate(SHORT)
    generate(SHORT)
    (folder / f"ready-{number}").touch()
    while not (folder / "go").exists() or not all((folder / f"ready-{n}").exists() for n in range(count)):
        time.sleep(0.05)
    turn, steps, busy = folder / "turn", [], []
    for round_number in range(run.get("rounds", ROUNDS)):
        mine = round_number * count + number
        while not turn.exists() or not turn.read_text() or int(turn.read_text()) != mine:
            time.sleep(0.002)
            if number == 0 and not turn.exists():
                turn.write_text("0")
        seconds.clear()
        calls.clear()
        short, began = generate(SHORT), time.thread_time()
        long = generate(LONG)
        busy.append((time.thread_time() - began) / LONG * 1e6)
        steps.append((long - short) / (LONG - SHORT) * 1e3)
        cost = {name: seconds[name] / max(calls["begin_step"], 1) * 1e6 for name in seconds}
        background = cost.pop("_record_waiting", 0.0)
        told = {"steps_ms": steps, "tokens": tokens[-1], "engine_thread_us": cost, "calls": dict(calls)}
        told |= {"main_thread_cpu_us": busy, "background_cpu_us": background}
        (place / "overhead.json").write_text(json.dumps(told))
        following = folder / f"turn-{number}"
        following.write_text(str(mine + 1))
        following.rename(turn)
    print(run["name"], steps, cost, background, busy, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
