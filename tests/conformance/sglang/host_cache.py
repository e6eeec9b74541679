"""HiCache of a real SGLang on the CPU: `python host_cache.py FOLDER [CASE...]`; a case is a layout, or a fault.

What only CUDA has is stood in for: streams and events, and the kernels that copy between the two pools, by torch. The tree, the
controller, the host's pool and the scheduler are SGLang's. Exit status 1 if a case's verdict or cause is not as expected.
"""

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def copy_layers(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Stand in for `transfer_kv_direct`: rows of each layer to rows of its counterpart."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def load_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int) -> None:
    """Stand in for `transfer_kv_per_layer_direct_pf_lf`: of pages that hold all layers one layer's rows."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[src_indices // page_size, layer_id, src_indices % page_size]


def store_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Stand in for `transfer_kv_all_layer_direct_lf_pf`: rows of all layers, K's before V's, to pages that hold them all."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, src in enumerate(src_ptrs):
        dst_ptrs[number // layers][dst_indices // page_size, number % layers, dst_indices % page_size] = src[
            src_indices
        ]


def stand_in() -> None:
    """Put in place what SGLang's host cache needs and a CPU build does not have."""
    import torch
    from sglang.srt.mem_cache.pool_host import base, common, mha

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, *_: Any) -> None:
            pass

        def wait(self, *_: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

        def elapsed_time(self, _: Any) -> float:
            return 0.0

    common._cuda_host_register = lambda *_: None
    base._cuda_host_unregister = lambda *_: None
    torch.cpu.Event = Event
    torch.cpu.Stream.wait_event = lambda *_: None
    mha.transfer_kv_direct = copy_layers
    mha.transfer_kv_per_layer_direct_pf_lf = load_pages
    mha.transfer_kv_all_layer_direct_lf_pf = store_pages


def generate(folder: Path, layout: str, page: int, policy: str) -> None:
    """Ask for prompts that come again when others have taken their slots; write the answers and what was cached down."""
    from engine import CPU_ENGINE
    from sglang.srt.entrypoints.engine import Engine

    stand_in()
    os.chdir(HERE)  # the trace keeps the model's name as it is given here
    engine = Engine(
        model_path="models/llama",
        **{**CPU_ENGINE, "log_level": "info", "max_running_requests": 3},
        disable_overlap_schedule=True,
        page_size=page,
        max_total_tokens=160,
        random_seed=1,
        enable_hierarchical_cache=True,
        hicache_ratio=4.0,
        hicache_io_backend="direct",
        hicache_mem_layout=layout,
        hicache_write_policy=policy,
    )
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    prompts = [tokens(rng.randrange(36, 60)) for _ in range(5)]
    answers, cached = [], []
    for batch in (
        prompts[:2],
        prompts[2:4],
        prompts[:1],
        prompts[4:],
        [prompts[1] + tokens(3), prompts[3]],
        prompts[:1],
    ):
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        for output in engine.generate(input_ids=batch, sampling_params=sampling):
            answers.append(output["output_ids"])
            cached.append(output["meta_info"].get("cached_tokens"))
    (folder / "tokens.json").write_text(json.dumps([answers, cached]))
    engine.shutdown()


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE / "standin")]
    from engine import ENVIRONMENT, forked, import_engine

    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read when the interpreter starts
        path = os.pathsep.join([str(HERE / "standin"), os.environ.get("PYTHONPATH", "")])
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT, "PYTHONPATH": path})
    import_engine()
    folder = Path(sys.argv[1]) / "layer_first"
    shutil.rmtree(folder, ignore_errors=True)
    env = {"KVCANARY_TRACE": str(folder / "traces")} if "record" in sys.argv else {}
    print(forked(folder, env, lambda: generate(folder, "layer_first", 1, "write_through"), 240.0))
    print((folder / "log").read_text()[-6000:])
