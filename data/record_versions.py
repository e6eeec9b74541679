"""Record the traces in data/versions/: one workload in several engines and engine versions, for `kvcanary diff`.

    python data/record_versions.py model -o /tmp/llama          # once: a tiny llama with seeded weights
    python data/record_versions.py sglang --model /tmp/llama    # in each SGLang's own environment
    python data/record_versions.py transformers --model /tmp/llama

SGLang runs on the CPU; its environment is the one that `make conformance-sglang` builds, with the version wanted.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
NEW_TOKENS = 12
# Read while SGLang is imported; see tests/conformance/sglang.
ENVIRONMENT = {
    "SGLANG_STANDIN": "cpu",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KVCANARY_COMPRESSION": "zstd",
}


def prompts() -> list[list[int]]:
    """Return six prompts, three of which begin alike."""
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    shared = tokens(24)
    return [tokens(9), shared + tokens(7), tokens(45), shared + tokens(16), tokens(3), shared + tokens(30)]


def make_model(folder: Path) -> None:
    """Write the model's config and seeded weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(folder)


def record_sglang(model: Path, output: Path) -> None:
    """Generate with the SGLang of this environment; its plugin records."""
    import sglang
    from sglang.srt.entrypoints.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVCANARY_TRACE"] = folder
        engine = Engine(
            model_path=str(model),
            skip_tokenizer_init=True,
            sampling_backend="pytorch",
            grammar_backend="none",
            device="cpu",
            attention_backend="torch_native",
            dtype="float32",
            mem_fraction_static=0.1,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            page_size=1,
            max_total_tokens=512,
            max_running_requests=8,
            chunked_prefill_size=32,
            log_level="error",
        )
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        for batch in (prompts()[:4], prompts()[4:]):  # the last one hits the prefix cache
            engine.generate(input_ids=batch, sampling_params=sampling)
        engine.shutdown()
        [trace] = Path(folder).glob("*.arrow")
        _keep(trace, output / f"sglang_{sglang.__version__}.arrow")


def record_transformers(model: Path, output: Path) -> None:
    """Generate with transformers' continuous batching, everything at once."""
    import torch
    import transformers
    from kvcanary.recorder.engines.transformers import attach
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(1)
    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.arrow"
        with attach(trace, compression="zstd"):
            llama.generate_batch(
                prompts(),
                generation_config=GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=8, num_blocks=64, max_batch_tokens=40, use_cuda_graph=False
                ),
                progress_bar=False,
            )
        _keep(trace, output / f"transformers_{transformers.__version__}.arrow")


def _keep(trace: Path, target: Path) -> None:
    target.write_bytes(trace.read_bytes())
    target.chmod(0o644)
    print(f"{target}: {target.stat().st_size:,} bytes")


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "sglang", "transformers"])
    parser.add_argument("--model", type=Path, help="the model's folder, named llama")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "versions")
    options = parser.parse_args()
    if options.what == "sglang" and any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    if options.what == "model":
        make_model(options.output)
        return
    if options.model is None:
        parser.error("--model is missing; make one with: record_versions.py model -o /tmp/llama")
    options.output.mkdir(parents=True, exist_ok=True)
    {"sglang": record_sglang, "transformers": record_transformers}[options.what](options.model, options.output)


if __name__ == "__main__":
    main()
