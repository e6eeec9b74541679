"""A text model that is fed positions of several dimensions (M-RoPE), as those with vision are: models/mrope."""

import torch


def register() -> None:
    """Have vLLM know the model, in the engine's process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMRoPE
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class TextOfSeveralDimensions(Qwen3ForCausalLM, SupportsMRoPE):
        def get_mrope_input_positions(self, input_tokens, *_args, **_kwargs):
            return torch.arange(len(input_tokens)).expand(3, -1).contiguous(), 0

    ModelRegistry.register_model("TextOfSeveralDimensions", TextOfSeveralDimensions)
