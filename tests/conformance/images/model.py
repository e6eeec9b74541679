"""A Qwen2-VL of two layers with made-up weights, and prompts with images for it.

Its positions have three dimensions (M-RoPE), and behind images they are not the tokens' places.
"""

import json
import random
from pathlib import Path

SIZE, PATCH = 128, 28
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "".join((SPECIAL[2], SPECIAL[4], SPECIAL[3]))  # where an image stands in a prompt
WORDS = 600


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
            words += [IMAGE, *(f"w{rng.randrange(WORDS)}" for _ in range(rng.choice([1, 3, 16, 40])))]
        found.append({"prompt": " ".join(words), **({"multi_modal_data": {"image": shown}} if shown else {})})
    # One text with two images of one size: without the images it is one prompt.
    text = " ".join([*(f"w{n}" for n in range(9)), IMAGE, *(f"w{n}" for n in range(40))])
    for n in (0, 1):
        pixels = np.random.RandomState(90 + n).randint(0, 255, (PATCH * 4, PATCH * 4, 3), np.uint8)
        found.append({"prompt": text, "multi_modal_data": {"image": [Image.fromarray(pixels)]}})
    return [*found, found[1], found[2]]
