"""Models of many families, small and with made-up weights: what differs is how they turn K, where windows are, what is biased."""

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "vocab_size": 640,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = [1.0 + i / 8 for i in range(32)]
ANGLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}
# Each is a config.json, over what all have.
FAMILIES: dict[str, dict[str, Any]] = {
    **{f"llama-{name}": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **angles}
       for name, angles in ANGLES.items()},
    "llama-one-head": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 1},
    "llama-wide": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "phi": {"architectures": ["PhiForCausalLM"], "model_type": "phi", "partial_rotary_factor": 0.5,
            "num_key_value_heads": 4, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 128,
             "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": LONG}},
    "gemma": {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 32, "head_dim": 64,
               "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 32,
               "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "rope_local_base_freq": 1000.0,
               "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 32,
              "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "granite": {"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
    "cohere": {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "layer_norm_eps": 1e-5},
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "sliding_window": 32,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "stablelm": {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "partial_rotary_factor": 0.25},
    "gpt-neox": {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "rotary_pct": 0.25,
                 "num_key_value_heads": 4, "hidden_act": "gelu"},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 3,
             "n_positions": 1024, "num_key_value_heads": 4, "activation_function": "gelu_new"},
    "opt": {"architectures": ["OPTForCausalLM"], "model_type": "opt", "num_key_value_heads": 4, "ffn_dim": 256, "word_embed_proj_dim": 256,
            "activation_function": "relu"},
    "bloom": {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 3, "n_head": 4},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh",
                   "norm_epsilon": 1e-5},
    "gptj": {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 256, "n_head": 4, "n_layer": 3,
             "n_positions": 1024, "num_key_value_heads": 4, "rotary_dim": 32, "activation_function": "gelu_new"},
    "glm": {"architectures": ["GlmForCausalLM"], "model_type": "glm", "partial_rotary_factor": 0.5},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "partial_rotary_factor": 0.5},
    "nemotron": {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2",
                 "partial_rotary_factor": 0.5, "norm_eps": 1e-5},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window": 32,
                "sliding_window_pattern": "LLG",
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 1, 0]},
    "no-angles-first": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [0, 1, 1]},
    "arcee": {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"},
    "seed-oss": {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"},
}  # fmt: skip


def model_of(family: str, folder: Path, *, dtype: str, bias: bool) -> str:
    """Write a family's config.json; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SIZES | {"torch_dtype": dtype, "attention_bias": bias} | FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
