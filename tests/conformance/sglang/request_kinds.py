"""Kinds of requests that a healthy SGLang serves: each run is recorded beside the online canary and must replay clean.

    python tests/conformance/sglang/request_kinds.py                 # all of them
    python tests/conformance/sglang/request_kinds.py --only beam

Exit status 1 where one is not clean, or online and offline differ.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from clients import (
    PICTURES,
    Client,
    aborted,
    adapter_folder,
    adapters,
    beams,
    embedded,
    flushed,
    images,
    paused,
    plain,
    preempted,
    salted,
    same_id,
    sessions,
    several,
    turns,
    updated,
    updated_without_a_flush,
)
from engine import CPU_ENGINE, ENVIRONMENT, MODELS
from layer_faults import change_a_late_layer, write_nan
from state_faults import free_states_early, overwrite_a_checkpoint, restore_another_checkpoint, save_checkpoints_late


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


def forget_adapters() -> None:
    """Leave the adapter out of the prefix cache's key."""
    from sglang.srt.managers.schedule_batch import Req

    begin = Req.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.extra_key = None

    Req.__init__ = without


def mix_up_adapters() -> None:
    """Give the requests of a batch one another's adapters."""
    from sglang.srt.lora.lora_manager import LoRAManager

    prepare = LoRAManager.prepare_lora_batch

    def turned(self: Any, batch: Any) -> None:
        own = batch.lora_ids
        batch.lora_ids = [*own[1:], *own[:1]]
        prepare(self, batch)
        batch.lora_ids = own

    LoRAManager.prepare_lora_batch = turned


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
    "layers-changed": Kind(run=plain, canary=False, fault=change_a_late_layer, finds=("layer_changed",)),
    "layers-nan": Kind(run=plain, canary=False, fault=write_nan, finds=("bad_values",)),
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
    "adapters-of-one-another": Kind(
        run=adapters, options=LORA, tokens=False, canary=False, fault=mix_up_adapters, finds=("computed_otherwise",)
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
