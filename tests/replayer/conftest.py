"""The model of the recordings in data/, for what compares them with it."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that data/record.py makes of its seed."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(LlamaConfig(**shape, num_hidden_layers=2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint_with_nan(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, whose embedding of token 55 is NaN, and of 99 infinite."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("with-nan")
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][55] = float("nan")
    weights["model.embed_tokens.weight"][99] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    return folder
