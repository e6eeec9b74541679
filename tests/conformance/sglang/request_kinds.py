"""Kinds of requests that a healthy SGLang serves: each run is recorded beside the online canary and must replay clean.

    python tests/conformance/sglang/request_kinds.py                 # all of them
    python tests/conformance/sglang/request_kinds.py --only beam

Exit status 1 where one is not clean, or online and offline differ.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine import CPU_ENGINE, ENVIRONMENT, MODELS
from state_faults import free_states_early, overwrite_a_checkpoint, restore_another_checkpoint, save_checkpoints_late

PICTURES = 490  # and the nine tokens behind it, see `use_placeholders`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What one run does with an engine, and with which options; `canary`: SGLang's own runs beside the recorder.

    `tokens`: it checks tokens, too; `statuses` must be told of some request; `retracts`: SGLang retracts every few steps;
    `unknown`: some tokens must be told as unknown; `fault` breaks the engine.
    """

    run: Callable[["Client"], Awaitable[None]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    canary: bool = True
    tokens: bool = True
    model: str = "llama"
    statuses: tuple[str, ...] = ()
    unknown: bool = False
    retracts: bool = False
    fault: Callable[[], None] | None = None
    finds: tuple[str, ...] = ()  # the checks that must find something


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
        await asyncio.sleep(1.5)
        await client.manager.pause_generation(PauseGenerationReqInput(mode=mode))
        await asyncio.sleep(0.5)
        await client.manager.continue_generation(ContinueGenerationReqInput())
    await client.all(*running)


async def preempted(client: Client) -> None:
    low = [asyncio.ensure_future(client.ask(client.tokens(20), new=60, priority=1)) for _ in range(3)]
    await asyncio.sleep(1.5)
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


def forget_adapters() -> None:
    """Leave the adapter out of the prefix cache's key."""
    from sglang.srt.managers.schedule_batch import Req

    begin = Req.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.extra_key = None

    Req.__init__ = without


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


def adapter_folder(name: str) -> str:
    """Return the folder of a LoRA adapter for the model `llama`, made of random numbers."""
    import torch
    from safetensors.torch import save_file

    folder = Path(tempfile.gettempdir()) / f"kvcanary-lora-{os.getuid()}" / name
    if not (folder / "adapter_model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((MODELS / "llama" / "config.json").read_text())
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


OVERLAP: dict[str, Any] = {"disable_overlap_schedule": False}
SMALL: dict[str, Any] = {"max_total_tokens": 200}
EMBEDDED: dict[str, Any] = {"disable_radix_cache": True, "dtype": "bfloat16", "chunked_prefill_size": 256}
LORA: dict[str, Any] = {
    "lora_paths": [f"{name}={adapter_folder(name)}" for name in ("first", "second")],
    "lora_backend": "torch_native",
    "max_loras_per_batch": 4,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj"],
}
KINDS: dict[str, Kind] = {
    "plain": Kind(run=plain),
    "plain-overlap-page4": Kind(run=plain, options={**OVERLAP, "page_size": 4}),
    "plain-no-radix": Kind(run=plain, options={"disable_radix_cache": True}),
    "plain-hybrid-page4": Kind(run=plain, model="mellum_hybrid", options={"page_size": 4}),
    "recurrent": Kind(run=plain, model="lfm2", canary=False),
    "recurrent-overlap-aborted": Kind(run=aborted, model="lfm2", options=OVERLAP, canary=False),
    "recurrent-flushed": Kind(run=flushed, model="lfm2", canary=False),
    "recurrent-retracted": Kind(run=plain, model="lfm2", canary=False, retracts=True, statuses=("retracted",)),
    "recurrent-turns-evicted": Kind(run=turns, model="lfm2", options=SMALL, canary=False),
    **{
        f"recurrent-{name}": Kind(run=run, model="lfm2", canary=False, fault=fault, finds=("state_differs",))
        for name, fault, run in (
            ("another-checkpoint", restore_another_checkpoint, turns),
            ("freed-early", free_states_early, turns),
            ("saved-late", save_checkpoints_late, plain),  # a turn goes on from what a finished request left
            ("overwritten", overwrite_a_checkpoint, turns),
        )
    },
    "turns": Kind(run=turns, options={"page_size": 4}),
    "same-id": Kind(run=same_id),
    "same-id-overlap": Kind(run=same_id, options=OVERLAP),
    "beams": Kind(run=beams, tokens=False),
    "beams-overlap": Kind(run=beams, options=OVERLAP, tokens=False),
    "paused": Kind(run=paused, statuses=("retracted",)),
    "paused-overlap": Kind(run=paused, options=OVERLAP, statuses=("retracted",)),
    "preempted": Kind(
        run=preempted,
        options={
            "max_running_requests": 3,
            "enable_priority_scheduling": True,
            "priority_scheduling_preemption_threshold": 5,
        },
        statuses=("retracted",),
    ),
    "embedded": Kind(run=embedded, options=EMBEDDED, tokens=False, unknown=True),
    "embedded-overlap": Kind(run=embedded, options={**EMBEDDED, **OVERLAP}, tokens=False, unknown=True),
    "embedded-retracted": Kind(
        run=embedded, options={**EMBEDDED, "max_total_tokens": 160}, tokens=False, retracts=True
    ),
    "images": Kind(run=images, tokens=False),
    "sessions": Kind(run=sessions),
    "adapters": Kind(run=adapters, options=LORA, tokens=False),
    "salted": Kind(run=salted),
    "updated": Kind(run=updated),
    "adapters-key-without": Kind(
        run=adapters, options=LORA, tokens=False, canary=False, fault=forget_adapters, finds=("identity",)
    ),
    "updated-no-flush": Kind(run=updated_without_a_flush, finds=("identity",)),
    "several": Kind(run=several),
    "several-overlap": Kind(run=several, options=OVERLAP),
    "aborted": Kind(run=aborted, options={"max_total_tokens": 512}),
    "aborted-overlap": Kind(run=aborted, options={"max_total_tokens": 512, **OVERLAP}),
    "flushed": Kind(run=flushed),
    "chunked-retracted-overlap": Kind(
        run=plain, options={**SMALL, **OVERLAP, "chunked_prefill_size": 8}, retracts=True
    ),
}


def serve(kind: Kind) -> None:
    """Start an engine, let the run have it, and shut it down."""
    from sglang.srt.entrypoints.engine import Engine

    canary = {"kv_canary": "log", "kv_canary_real_data": "partial", "kv_canary_sweep_interval": 4}
    options = {
        **CPU_ENGINE,
        "disable_overlap_schedule": True,
        "max_total_tokens": 512,
        "random_seed": 1,
        **(canary if kind.canary else {}),
        **kind.options,
    }
    engine = Engine(model_path=str(MODELS / kind.model), **options)
    engine.loop.run_until_complete(kind.run(Client(engine)))
    time.sleep(0.5)
    engine.shutdown()


def use_placeholders() -> None:
    """Put placeholders in the place of some tokens, as SGLang does for images: ids of 62 bits, that the model clamps."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.models.llama import LlamaModel

    begin, forward = Req.__init__, LlamaModel.forward

    def with_placeholders(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for i, token in enumerate(self.origin_input_ids):
            if token >= PICTURES:
                self.origin_input_ids[i] = (1 << 61) + (token << 33) + 0x80000000 + token

    def clamped(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, input_ids.clamp(0, self.vocab_size - 1), *args, **kwargs)

    Req.__init__, LlamaModel.forward = with_placeholders, clamped


def load_adapters() -> None:
    """Have adapters be loaded from their files, although the model's weights are made."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora import lora

    class FromFiles(lora.DefaultModelLoader):
        def __init__(self, _: Any) -> None:
            super().__init__(LoadConfig())

    lora.DefaultModelLoader = FromFiles


def use_plain_convolutions() -> None:
    """Put loops in the place of a recurrent model's kernels, which neither the CPU nor Triton's interpreter runs."""
    import torch
    from sglang.srt.models import lfm2

    def step(state: Any, token: Any, weight: Any) -> Any:
        """Return one token's output `[dim]`; `state` `[dim, width - 1]` moves on by it."""
        window = torch.cat([state, token[:, None]], dim=1)
        state.copy_(window[:, 1:])
        return (window * weight).sum(dim=1)

    def extend(x: Any, weight: Any, _bias: Any, *, query_start_loc: Any, cache_indices: Any, **rest: Any) -> Any:
        out, bounds = torch.empty_like(x), query_start_loc.tolist()
        for r, slot in enumerate(cache_indices.tolist()):
            state = rest["conv_states"][slot]
            if not rest["has_initial_state"][r]:
                state.zero_()
            for t in range(bounds[r], bounds[r + 1]):
                out[:, t] = step(state, x[:, t], weight)
        return out

    def decode(x: Any, states: Any, weight: Any, *_: Any, conv_state_indices: Any, **_rest: Any) -> Any:
        slots = conv_state_indices.tolist()
        return torch.stack([step(states[slot], token, weight) for slot, token in zip(slots, x, strict=True)])

    lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = extend, decode


def run_forked(kind: Kind, folder: Path, timeout_s: float) -> int:
    """Run one kind; its log, the canary's ring and the trace go into `folder`. Return the exit status."""
    from engine import forked, note_violations, retract_now_and_then

    def run() -> None:
        note_violations(folder / "ring")
        if kind.retracts:
            retract_now_and_then()
        if kind.run is images:
            use_placeholders()
        if kind.run is adapters:
            load_adapters()
        if kind.fault is not None:
            kind.fault()
        if kind.model == "lfm2":
            use_plain_convolutions()
        serve(kind)

    environment = {
        "SGLANG_KV_CANARY_ENABLE_MHA_V": "1",
        "SGLANG_KV_CANARY_RING_CAPACITY": "1000000",
        "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": str(int(kind.tokens)),
        "KVCANARY_TRACE": str(folder / "traces"),
        **kind.environment,
    }
    return forked(folder, environment, run, timeout_s)


def judge(folder: Path) -> dict[str, Any]:
    """Return what the comparison with the online canary says, and how often which status was told."""
    from collections import Counter

    from compare import compare
    from kvcanary.recorder.trace.reader import read_trace

    (trace,) = (folder / "traces").glob("*.arrow")
    told: Counter[str] = Counter()
    for view in read_trace(trace):
        if view.kind == "status":
            told[str(view.scalar("status"))] += 1
        told["unknown tokens"] += int((view.ints("input_ids") == -1).sum())
    found = dataclasses.asdict(compare(folder))
    found["differences"] = [one for one in found["differences"] if not one.startswith("the engine answered")]
    return {**found, "statuses": told}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep logs, traces and reports in this folder")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a run")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge:
        print(json.dumps(judge(args.judge)))
        return 0
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    from engine import import_engine

    folder = args.keep or Path(tempfile.mkdtemp(prefix="conformance-sglang-"))
    folder.mkdir(parents=True, exist_ok=True)
    import_engine()
    failed = 0
    for name, kind in KINDS.items():
        if args.only not in name:
            continue
        started = time.monotonic()
        shutil.rmtree(folder / name, ignore_errors=True)
        status = run_forked(kind, folder / name, args.timeout)
        judged = subprocess.run(  # what a replay imports has threads, which a forked engine must not inherit
            [sys.executable, __file__, "--judge", folder / name], capture_output=True, text=True, check=False
        )
        if judged.returncode:
            print(f"{name}: not judged: {judged.stderr.strip()[-800:]}", flush=True)
            failed += 1
            continue
        result = json.loads(judged.stdout.splitlines()[-1])
        wrong = [one for one in result["differences"] if kind.canary]
        expected = "corrupt" if kind.finds else "clean"
        wrong += [f"it is {result['verdict']}, expected {expected}"] * (result["verdict"] != expected)
        wrong += [f"the engine ended with {status}, see its log"] * (status != 0)
        wrong += [f"no request was {said}" for said in kind.statuses if not result["statuses"].get(said)]
        wrong += ["no token was told as unknown"] * (kind.unknown and not result["statuses"]["unknown tokens"])
        wrong += [f"{check}: {count}" for check, count in result["findings"].items() if check not in kind.finds]
        wrong += [f"{check} found nothing" for check in kind.finds if check not in result["findings"]]
        failed += bool(wrong)
        print(
            f"{name}: {'as it should be' if not wrong else 'WRONG'}   {result['forwards']} forwards, "
            f"{result['online_rows']} online rows, {result['offline_rows']} offline, {result['statuses']}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        for one in wrong[:6]:
            print(f"    {one}", flush=True)
    if not args.keep:
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
