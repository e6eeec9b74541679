"""vLLM on the CPU with real images, recorded: healthy runs must replay clean with the tokens of unrecorded ones, faults must be found.

    python tests/conformance/vllm/images.py FOLDER            # every healthy run and every fault
    python tests/conformance/vllm/images.py FOLDER --only few --seeds 3
    python tests/conformance/vllm/images.py FOLDER --gpu v2 --at-once 8   # on a GPU, with that model runner
    python tests/conformance/vllm/images.py FOLDER --gpu v2 --engines     # there: only the engines
    python tests/conformance/vllm/images.py FOLDER --gpu v2 --judge       # of what they left, on any machine

Needs `torchvision` without its dependencies beside what `install.sh` has; of builds for another torch two operators are declared
that nobody calls. The model is a Qwen2-VL of two layers with made-up weights: its positions have three dimensions (M-RoPE), and
behind images they are not the tokens' places. Exit status 1 if something is not as it should be.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZE, PATCH = 128, 28
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = 600
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
HEALTHY = {
    "plain": {},
    "few-blocks": {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 48},
    "async": {"async_scheduling": True, "num_gpu_blocks_override": 14},
    "nocache": {"enable_prefix_caching": False, "max_num_batched_tokens": 48},
    "ngram": {"speculative_config": NGRAM},
}
# Of the others the decodes run in CUDA graphs on a GPU.
EAGER = ("few-blocks", "nocache")
# What is planted, and the kinds of incidents that are right.
FAULTS = {
    "key": ("the prefix cache's key leaves out the images", {"identity_not_in_key"}),
    "fed": (
        "text behind an image is fed positions that are one off, in one dimension",
        {"position_off", "draft_position_plus_one"},
    ),
    "slot": ("a token behind an image is written to its neighbour's slot", {"slot_mapping", "req_to_token"}),
}
PATIENCE_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--seeds", type=int, default=1, help="so many workloads of each healthy run")
    parser.add_argument("--gpu", choices=("v1", "v2"), default="", help="run on a GPU, with this model runner")
    parser.add_argument("--at-once", type=int, default=1, help="so many engines at a time")
    parser.add_argument("--engines", action="store_true", help="run the engines, and replay nothing")
    parser.add_argument(
        "--judge", action="store_true", help="replay what engines have left in the folder, and run none"
    )
    parser.add_argument("--run", nargs=3, metavar=("NAME", "SEED", "OUTPUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        generate(args.folder, args.run[0], int(args.run[1]), Path(args.run[2]), args.gpu)
        return 0
    # The V2 runner makes positions and slots in kernels of its own, which these faults do not reach.
    faults = [name for name in FAULTS if args.gpu != "v2" or name == "key"]
    runs = [*((name, seed) for name in HEALTHY for seed in range(args.seeds)), *((name, 0) for name in faults)]
    runs = [(name, seed) for name, seed in runs if args.only in name]
    if not args.judge:
        args.folder.mkdir(parents=True, exist_ok=True)
        run("make", 0, args.folder, None, args.gpu)
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda one: run_both(*one, args.folder, args.gpu), runs))
    said = [] if args.engines else [judged(name, seed, args.folder) for name, seed in runs]
    for (name, seed), wrong in zip(runs, said, strict=False):
        print(f"{args.gpu or 'cpu'} {name} {seed}: {wrong or 'as it should be'}", flush=True)
    return int(any(said))


def run_both(name: str, seed: int, folder: Path, gpu: str) -> None:
    """Run once, and what is healthy once more without the recorder."""
    for traces in (folder / f"{name}-{seed}", *([None] if name in HEALTHY else [])):
        run(name, seed, folder, traces, gpu)


def judged(name: str, seed: int, folder: Path) -> str:
    """Return what is not as it should be of a run."""
    traces = folder / f"{name}-{seed}"
    recorded, plain = (folder / f"{name}-{seed}{what}.json" for what in ("", "-unrecorded"))
    if not recorded.exists():
        return f"the engine ended early: {recorded.with_suffix('.log')}"
    command = [sys.executable, "-c", "from kvcanary.cli import replay_main; replay_main()", "--json"]
    command += ["--report", str(traces / "report"), *map(str, traces.glob("*.arrow"))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        return ran.stderr[-300:]
    if name in HEALTHY:
        same = plain.exists() and recorded.read_text() == plain.read_text()
        return (
            ""
            if same and not ran.returncode
            else f"replay {ran.returncode}, the tokens are {'' if same else 'not '}the same"
        )
    find = [
        sys.executable,
        "-c",
        "from kvcanary.cli import main; main()",
        "incidents",
        str(traces / "report"),
        "--json",
    ]
    told = subprocess.run(find, capture_output=True, text=True, check=False)
    kinds = [incident["kind"] for incident in json.loads(told.stdout)["incidents"]] if not told.returncode else []
    return "" if kinds and kinds[0] in FAULTS[name][1] else f"not found: {kinds} {told.stderr[-200:]}"


def run(name: str, seed: int, folder: Path, traces: Path | None, gpu: str) -> int:
    """Run this file in a process of its own, recorded if there is a folder for traces; return its exit status."""
    from engine import ENVIRONMENT

    told = f"{name}-{seed}{'' if traces else '-unrecorded'}"
    environment = {**os.environ, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(int(gpu == "v2"))}
    environment |= {"KVCANARY_TRACE": str(traces)} if traces else {}
    if not gpu:  # vLLM looks at a model in processes of its own, which import torchvision, too
        stand_in = folder / "stand-in"
        stand_in.mkdir(exist_ok=True)
        text = f"import sys; sys.path.append({str(HERE)!r})\nimport images; images.declare()\n"
        (stand_in / "sitecustomize.py").write_text(text)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(stand_in), os.environ.get("PYTHONPATH"))))
    with (folder / f"{told}.log").open("w") as log:
        command = [sys.executable, __file__, str(folder), "--run", name, str(seed), str(folder / f"{told}.json")]
        command += ["--gpu", gpu] if gpu else []
        return subprocess.run(
            command, stdout=log, stderr=log, env=environment, timeout=PATIENCE_S, check=False
        ).returncode


def declare() -> None:
    """Declare the operators that torchvision's own modules look for, where its build is for another torch."""
    import torch

    try:
        import torchvision  # noqa: F401  # whether it can be
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        kept.append(library)


kept: list[object] = []  # a library's definitions go with it


def make_model(folder: Path) -> None:
    """Write a model's configuration, a tokenizer of made-up words and what takes images apart."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    words = {**{f"w{n}": n for n in range(WORDS)}, **{name: WORDS + n for n, name in enumerate(SPECIAL)}}
    told = Tokenizer(models.WordLevel(words, unk_token="w0"))
    told.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=told, eos_token=SPECIAL[1], pad_token=SPECIAL[0], additional_special_tokens=[*SPECIAL[2:]]
    )
    pixels = {"min_pixels": 2 * PATCH**2, "max_pixels": 16 * PATCH**2}
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        video_processor=Qwen2VLVideoProcessor(**pixels),
        tokenizer=tokenizer,
        chat_template="none",
    ).save_pretrained(folder)
    ids = {name: words[token] for name, token in zip(
        ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), SPECIAL[2:], strict=True
    )}  # fmt: skip
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": SIZE,
        "intermediate_size": SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": WORDS,
        "eos_token_id": WORDS + 1, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, **ids,
        "vision_config": {"depth": 1, "embed_dim": 64, "hidden_size": SIZE, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14,
                          "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def prompts_of(rng: random.Random, count: int) -> list[dict]:
    """Return prompts with up to two images each, some of which begin alike, and two that are there twice."""
    import numpy as np
    from PIL import Image

    shapes = [(PATCH * (2 + n % 3), PATCH * (2 + n % 4), 3) for n in range(6)]
    images = [
        Image.fromarray(np.random.RandomState(n).randint(0, 255, shape, np.uint8)) for n, shape in enumerate(shapes)
    ]
    found: list[dict] = []
    for _ in range(count):
        front = random.Random(7) if rng.random() < 0.6 else rng
        words = [f"w{front.randrange(WORDS)}" for _ in range(rng.choice([1, 5, 17, 32]))]
        shown = [images[rng.randrange(6)] for _ in range(rng.choice([0, 1, 1, 2]))]
        for _ in shown:
            words += [
                SPECIAL[2],
                SPECIAL[4],
                SPECIAL[3],
                *(f"w{rng.randrange(WORDS)}" for _ in range(rng.choice([1, 3, 16, 40]))),
            ]
        found.append({"prompt": " ".join(words), **({"multi_modal_data": {"image": shown}} if shown else {})})
    # One text with two images of one size: without the images it is one prompt.
    text = " ".join(
        [f"w{n}" for n in range(9)] + [*SPECIAL[2:3], SPECIAL[4], SPECIAL[3]] + [f"w{n}" for n in range(40)]
    )
    for n in (0, 1):
        pixels = np.random.RandomState(90 + n).randint(0, 255, (PATCH * 4, PATCH * 4, 3), np.uint8)
        found.append({"prompt": text, "multi_modal_data": {"image": [Image.fromarray(pixels)]}})
    return [*found, found[1], found[2]]


def plant(fault: str) -> None:
    """Have the engine make a mistake."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if fault == "key":
        kv_cache_utils._gen_mm_extra_hash_keys = lambda _request, _start, _end, first: ([], first)
    if fault == "fed":
        made = GPUModelRunner._calc_mrope_positions

        def calc(runner, scheduled):
            made(runner, scheduled)
            if scheduled.total_num_scheduled_tokens == runner.input_batch.num_reqs:
                runner.mrope_positions.cpu[1, : runner.input_batch.num_reqs] += 1

        GPUModelRunner._calc_mrope_positions = calc
    if fault == "slot":
        from vllm.v1.worker.block_table import BlockTable

        computed, done = BlockTable.compute_slot_mapping, []

        def compute(table, count, starts, positions):
            computed(table, count, starts, positions)
            if not done and int(positions.shape[0]) == count and int(positions[0]) > 80:
                done.append(1)
                table.slot_mapping.gpu[0] -= 1

        BlockTable.compute_slot_mapping = compute


def generate(folder: Path, name: str, seed: int, output: Path, gpu: str) -> None:
    """Start the engine, generate from prompts with images, three times, and shut it down."""
    declare()
    if name == "make":
        make_model(folder / "model")
        return
    from vllm import LLM, SamplingParams

    plant(name)
    settings = {"max_model_len": 288, "max_num_seqs": 6, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 96}
    where = {"dtype": "float32", "enforce_eager": True}
    if gpu:
        where = {"dtype": "bfloat16", "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28}
        graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
        where |= {"enforce_eager": True} if name in EAGER else graphs
    llm = LLM(
        model=str(folder / "model"), load_format="dummy", block_size=32, seed=0,
        limit_mm_per_prompt={"image": 2, "video": 0}, **{**settings, **where, **HEALTHY.get(name, {})},
    )  # fmt: skip
    rng, outputs = random.Random(seed), []
    for _ in range(3):
        prompts = prompts_of(rng, 10)
        sampling = [
            SamplingParams(max_tokens=rng.choice([1, 5, 12, 30]), temperature=0, ignore_eos=True) for _ in prompts
        ]
        outputs += [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]
    output.write_text(json.dumps(outputs))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    sys.exit(main())
