"""Tiny random models for transformers' continuous batching, and one way to run them."""

import warnings
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        Gemma3TextConfig,
        GenerationConfig,
        LlamaConfig,
        MistralConfig,
    )

_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11], [5, 6, 7, 8] * 6 + [3], list(range(20, 95)), [4]]


def config(name: str) -> Any:
    if name == "llama":
        return LlamaConfig(**_SHAPE, num_hidden_layers=2)
    if name == "mistral_sliding":
        return MistralConfig(**_SHAPE, num_hidden_layers=2, sliding_window=32)
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        **_SHAPE, num_hidden_layers=4, layer_types=layers, sliding_window=32, query_pre_attn_scalar=32
    )


def model(name: str) -> Any:
    torch.set_num_threads(1)  # matrices this small only lose by threads, above all on a busy machine
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(name), attn_implementation="sdpa")


def generate(
    model: Any,
    prompts: list[list[int]] | None = None,
    *,
    keep_manager: bool = False,
    plain: bool = False,
    **options: Any,
) -> list[list[int]]:
    """Run the prompts and return what was generated; options are those of the generation or of continuous batching.

    With `plain` by `generate_batch`, whose requests reach the running loop one by one, so that batches differ from run
    to run; else all of them are there when the loop begins.
    """
    generation = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1, "num_return_sequences": 1, "top_k": 50}
    batching = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 48, "use_cuda_graph": False}
    generation |= {key: options.pop(key) for key in list(options) if key in generation}
    configs = {
        "generation_config": GenerationConfig(**generation),
        "continuous_batching_config": ContinuousBatchingConfig(**{**batching, "max_requests_per_batch": 16, **options}),
    }
    prompts = prompts or PROMPTS
    torch.manual_seed(1)
    if plain:
        answers = list(model.generate_batch(prompts, **configs).values())
        assert all(answer.error is None for answer in answers)
        return [answer.generated_tokens for answer in answers]
    manager = model.init_continuous_batching(**configs)
    manager.background_thread_status.clear()  # a kept manager has been stopped
    for prompt in prompts:
        manager.add_request(prompt)
    manager.start()
    found = {}
    for _ in range(len(prompts) * generation["num_return_sequences"]):
        answer = manager.get_result(timeout=600)
        assert answer is not None
        assert answer.error is None, answer.error
        found[answer.request_id] = answer.generated_tokens
    manager.stop(block=True, timeout=600, keep_for_next_session=keep_manager)
    return [found[name] for name in sorted(found)]
