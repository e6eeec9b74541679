"""What clients ask of an engine, one function for each kind of requests: seeded, and over the engine's own manager."""

import asyncio
import json
import os
import random
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from engine import MODELS

PICTURES = 490  # and the nine tokens behind it, see `request_kinds.use_placeholders`


class Client:
    """Sends seeded requests to one engine."""

    flushes = True

    def __init__(self, engine: Any, seed: int = 1) -> None:
        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.rng = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 500) for _ in range(count)]

    def embeddings(self, count: int) -> list[list[float]]:
        return [[self.rng.uniform(-1, 1) for _ in range(64)] for _ in range(count)]

    async def ask(self, prompt: list[int] | None = None, *, new: int = 12, **more: Any) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
        asked = GenerateReqInput(input_ids=prompt, sampling_params=sampling, **more)
        answer = await anext(self.manager.generate_request(asked, None))
        for one in answer if isinstance(answer, list) else [answer]:
            print("generated", one.get("output_ids"), one["meta_info"].get("finish_reason"), flush=True)
        return answer

    async def all(self, *asked: Awaitable[Any]) -> None:
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                print("refused", type(answer).__name__, answer, flush=True)


async def plain(client: Client) -> None:
    prompts = [client.tokens(n) for n in (30, 9, 50, 21)]
    await client.all(*(client.ask(p) for p in prompts))
    await client.all(*(client.ask(p + client.tokens(5)) for p in prompts))


async def turns(client: Client) -> None:
    """Conversations: each prompt is the one before, its answer, and something new."""

    async def talk(length: int) -> None:
        prompt = client.tokens(length)
        for n in (9, 5, 12):
            answer = await client.ask(prompt, new=n)
            prompt = prompt + answer["output_ids"] + client.tokens(n)

    await client.all(*(talk(n) for n in (30, 9, 50)))


async def same_id(client: Client) -> None:
    """One id for a whole conversation, and for a retry after an abort."""
    for n in (30, 60, 90):  # each prompt covers what was sampled last
        await client.ask(client.tokens(n), rid="conversation", new=9)
    retried = asyncio.ensure_future(client.ask(client.tokens(25), rid="retried", new=100))
    await asyncio.sleep(1.5)
    client.manager.abort_request("retried")
    await asyncio.gather(retried, return_exceptions=True)
    await client.all(client.ask(client.tokens(120), rid="retried", new=8), client.ask(client.tokens(9)))
    await client.all(client.ask(client.tokens(150), rid="retried", new=1), client.ask(client.tokens(9)))
    await client.all(client.ask(client.tokens(170), rid="retried", new=2), client.ask(client.tokens(9)))


async def beams(client: Client) -> None:
    wide = {"sampling": {"beam_width": 3}}
    await client.all(
        client.ask(client.tokens(20), **wide),
        client.ask(client.tokens(30), new=16),
        client.ask(client.tokens(7), **wide),
    )
    await client.all(*(client.ask(client.tokens(12)) for _ in range(3)), client.ask(client.tokens(14), **wide))


async def paused(client: Client) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    running = [asyncio.ensure_future(client.ask(client.tokens(n), new=60)) for n in (25, 40, 9)]
    for mode in ("retract", "in_place", "retract"):
        await asyncio.sleep(0.4)  # they run, and are not through
        await client.manager.pause_generation(PauseGenerationReqInput(mode=mode))
        await asyncio.sleep(0.5)
        await client.manager.continue_generation(ContinueGenerationReqInput())
    await client.all(*running)


async def preempted(client: Client) -> None:
    low = [asyncio.ensure_future(client.ask(client.tokens(20), new=60, priority=1)) for _ in range(3)]
    await asyncio.sleep(0.4)
    high = [asyncio.ensure_future(client.ask(client.tokens(30), new=10, priority=100)) for _ in range(3)]
    await client.all(*low, *high)


async def embedded(client: Client) -> None:
    """Prompts of embeddings, which this SGLang takes neither in chunks nor in one batch with others."""
    await client.all(*(client.ask(input_embeds=client.embeddings(n), new=24) for n in (20, 30, 7)))
    late = asyncio.ensure_future(client.ask(input_embeds=client.embeddings(33), new=40))
    await asyncio.sleep(0.5)
    await client.all(client.ask(client.tokens(30)), client.ask(client.tokens(9)), late)


async def images(client: Client) -> None:
    """Prompts that share a picture: see `use_placeholders`."""
    picture, other = [PICTURES + i % 4 for i in range(12)], [PICTURES + 4 + i % 4 for i in range(12)]
    head, tail = client.tokens(8), client.tokens(6)
    await client.ask(head + picture + tail)
    await client.all(client.ask(head + picture + client.tokens(9)), client.ask(head + other + tail))
    await client.ask(head + picture + tail, new=20)


async def updated_without_a_flush(client: Client) -> None:
    client.flushes = False
    await updated(client)


async def adapters(client: Client) -> None:
    """Requests of two LoRA adapters and of none, some with the same prompt; one adapter is put in another's place."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

    prompt = client.tokens(40)
    for name in (None, "first", "second", "first"):
        await client.ask(prompt + client.tokens(3), lora_path=name)
    await client.all(*(client.ask(client.tokens(20), lora_path=name) for name in ("first", "second", None)))
    await client.manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name="second"))
    await client.manager.load_lora_adapter(
        LoadLoRAAdapterReqInput(lora_name="second", lora_path=adapter_folder("third"))
    )
    await client.all(*(client.ask(prompt + client.tokens(3), lora_path=name) for name in ("first", "second")))


async def salted(client: Client) -> None:
    """The same prompt under several salts, and under none."""
    prompt = client.tokens(40)
    for salt in (None, "a", "b", "a", None):
        await client.ask(prompt + client.tokens(3), extra_key=salt)


async def updated(client: Client) -> None:
    """New weights, and a flush of what the old ones computed."""
    import torch
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.utils import MultiprocessingSerializer

    prompt = client.tokens(40)
    for scale in (1.0, 2.0):
        await client.ask(prompt + client.tokens(3))
        norm = [("model.norm.weight", torch.full((64,), scale))]
        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(norm)], flush_cache=client.flushes
        )
        await client.manager.begin_weight_update(BeginWeightUpdateReqInput())
        print("updated", await client.manager.update_weights_from_tensor(asked, None), flush=True)
        await client.manager.end_weight_update(EndWeightUpdateReqInput())
    await client.ask(prompt + client.tokens(3))


def adapter_folder(name: str, model: str = "llama", place: Path | None = None) -> str:
    """Return the folder of a LoRA adapter for a model, made of random numbers; in `place`, if not in a folder for all."""
    import torch
    from safetensors.torch import save_file

    folder = (place or Path(tempfile.gettempdir()) / f"kvcanary-lora-{os.getuid()}") / name
    if not (folder / "adapter_model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((MODELS / model / "config.json").read_text())
        hidden, dim, outputs = config["hidden_size"], config["head_dim"], {"q_proj": "num_attention_heads"}
        outputs |= dict.fromkeys(("k_proj", "v_proj"), "num_key_value_heads")
        said = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(outputs), "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        dice = torch.Generator().manual_seed(len(name))
        layers = {
            f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": torch.randn(
                (8, hidden) if part == "A" else (config[heads] * dim, 8), generator=dice
            )
            for layer in range(config["num_hidden_layers"])
            for name, heads in outputs.items()
            for part in "AB"
        }
        save_file(layers, folder / "adapter_model.safetensors")
    return str(folder)


async def sessions(client: Client) -> None:
    session = await client.manager.open_session(_open_session())
    rid = None
    for n in (20, 7, 9):
        params = {"id": session, "rid": rid, "offset": -1, "replace": False}
        rid = (await client.ask(client.tokens(n), session_params=params))["meta_info"]["id"]
    await client.ask(client.tokens(30))


def _open_session() -> Any:
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    return OpenSessionReqInput(capacity_of_str_len=1000)


async def several(client: Client) -> None:
    """n > 1, with sampling; log-probabilities; one token; stop tokens."""
    hot = {"n": 3, "temperature": 1.0}
    await client.all(client.ask(client.tokens(20), sampling=hot), client.ask(client.tokens(33), new=1))
    await client.all(
        client.ask(client.tokens(40), return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
        client.ask(client.tokens(40), sampling={"temperature": 1.0, "top_p": 0.9, "ignore_eos": False}),
        client.ask(client.tokens(11), new=1, return_logprob=True, logprob_start_len=0),
    )


async def aborted(client: Client) -> None:
    """While prefilling chunk by chunk, while decoding, while waiting."""
    running = [asyncio.ensure_future(client.ask(client.tokens(150), rid=f"a{i}", new=100)) for i in range(4)]
    for i in range(3):
        await asyncio.sleep(0.4 + 0.5 * i)
        client.manager.abort_request(f"a{i}")
    await asyncio.sleep(1)
    client.manager.abort_request(abort_all=True)
    await client.all(*running)
    await client.all(*(client.ask(client.tokens(20)) for _ in range(3)))


async def flushed(client: Client) -> None:
    prompt = client.tokens(40)
    for _ in range(3):
        await client.all(client.ask(prompt), client.ask(prompt[:20] + client.tokens(9)))
        await client.manager.flush_cache()
