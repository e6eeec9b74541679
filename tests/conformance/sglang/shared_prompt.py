"""A request outlives its sliding window while others come with its prompt: `python shared_prompt.py FOLDER`, for docs/guide/bisect.md.

SGLang gives back the window of a request's cached prompt early if SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW asks for it. Until
0.5.15 the next request with that prompt then freed slots that the first one still read. The model is the plain one whose first layer
is said to slide, as none of those that really do runs on a CPU in all these versions.
"""

import asyncio
import os
import random
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EARLY = {"SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW": "1", "SGLANG_SWA_EVICTION_INTERVAL": "1"}


def generate() -> None:
    """Serve one long answer, and short ones beside it: the same prompt once, then others, which take what is free."""
    from sglang.srt.configs import model_config
    from sglang.srt.entrypoints.engine import Engine

    model_config.is_hybrid_swa_model = lambda *args, **kwargs: True
    model_config.get_hybrid_layer_ids = lambda *args, **kwargs: ([0], [1])
    from engine import CPU_ENGINE

    os.chdir(HERE)  # the trace keeps the model's name as it is given here
    engine = Engine(
        model_path="models/llama",
        json_model_override_args='{"sliding_window": 16, "sliding_window_size": 16}',
        **{**CPU_ENGINE, "chunked_prefill_size": 128, "log_level": "warning"},
        disable_overlap_schedule=True,
        swa_full_tokens_ratio=1.0,
        max_total_tokens=200,
        random_seed=1,
    )
    rng = random.Random(7)
    prompt = [rng.randrange(3, 500) for _ in range(30)]

    def ask(ids: list[int], tokens: int, **options: bool):
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return engine.async_generate(input_ids=ids, sampling_params=sampling, **options)

    async def serve() -> None:
        beside, step = [], 0
        async for _ in await ask(prompt, 100, stream=True):
            step += 1
            if step == 30 or (36 <= step < 90 and step % 6 == 0):
                ids = prompt if step == 30 else [rng.randrange(3, 500) for _ in range(24)]
                beside.append(asyncio.ensure_future(ask(ids, 6)))
        await asyncio.gather(*beside)

    engine.loop.run_until_complete(serve())
    engine.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    from engine import ENVIRONMENT, forked, import_engine

    asked = {name: value for name, value in ENVIRONMENT.items() if name != "SGLANG_STANDIN_CANARY"} | EARLY
    if any(os.environ.get(name) != value for name, value in asked.items()):  # read when the interpreter starts
        path = os.pathsep.join([str(HERE / "standin"), os.environ.get("PYTHONPATH", "")])
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **asked, "PYTHONPATH": path})
    import_engine()
    folder = Path(sys.argv[1]) / "run"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier trial
    code = forked(folder, {"KVCANARY_TRACE": str(folder)}, generate, 240.0)
    print((folder / "log").read_text())
    sys.exit(code)
