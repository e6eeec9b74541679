"""Tiny checkpoints of real architectures with random weights, and what engines are asked with them."""

from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
HEADS = {**SHAPE, "head_dim": 32}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
CHECKPOINTS = {
    "llama": ("LlamaConfig", HEADS),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", {**HEADS, "sliding_window": None}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, "sliding_window": 32, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    "mla": ("DeepseekV3Config", {**SHAPE, "num_key_value_heads": 4, **MLA}),
}  # fmt: skip


def make_checkpoint(name: str, folder: Path, dtype: str = "float32", **more: Any) -> Path:
    """Write a checkpoint of a shape with random weights, and return its folder."""
    kind, options = CHECKPOINTS[name]
    return write_checkpoint(kind, {**options, **more}, folder, dtype)


def write_checkpoint(kind: str, options: dict[str, Any], folder: Path, dtype: str) -> Path:
    """Write a checkpoint of a class of configurations with random weights, and return its folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**options, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases begin as ones and zeros
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def prompts() -> list[list[int]]:
    """Return prompts of which some share a beginning."""
    import random

    rng = random.Random(1)
    shared = [rng.randrange(3, 600) for _ in range(40)]
    return [(shared if i % 2 else []) + [rng.randrange(3, 600) for _ in range(rng.randrange(5, 40))] for i in range(6)]
