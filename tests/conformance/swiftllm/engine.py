"""Real swiftLLM on a CPU, as `kvcanary check-adapter` drives it: its engine, scheduler, block managers, swapping, inputs and Llama.

    git clone https://github.com/interestingLSY/swiftLLM
    SWIFTLLM=swiftLLM kvcanary check-adapter tests/conformance/swiftllm/engine.py:Engine

What needs a GPU is replaced: streams and events (none), the kernels (plain torch, over the tables, lengths and ids that they are
given), the copies between the pools, the checkpoint (small random weights), Ray and the tokenizer, and how many blocks there is
room for. Engine and its main loop, scheduler, request ids, block managers, what is swapped, inputs, layers and sampling are
swiftLLM's own. A step is one turn of the engine's main loop.
"""

import asyncio
import importlib
import json
import os
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import swift_kernels
from torch import Tensor
from torch.overrides import TorchFunctionMode

VOCAB = 98
ROWS = 12  # more request ids than run at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an engine is made: `tokens` is what a step may have of prompts, `host` how many blocks are swapped to."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block: int = 8
    blocks: int = 15
    host: int = 24
    running: int = 4
    tokens: int = 64
    longest: int = 128


SETUP = Setup()


class _OnHost(TorchFunctionMode):
    """What is made on the GPU is made in the host's memory."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


class _Inline(ThreadPoolExecutor):
    """Runs what it is given at once: where it comes from a mode is on that a thread of its own would not have."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001
            done.set_exception(error)
        return done


class _Stream:
    def __init__(self, *_: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record(self) -> None: ...


def _load(weights: Any, getter: Any) -> None:
    """Fill weights in the place of a checkpoint's."""
    for item in weights.registered_weights:
        seeded = torch.Generator().manual_seed(sum(item.key.encode()))
        value = torch.ones(item.shape) if "norm" in item.key else torch.randn(item.shape, generator=seeded) * 0.3
        setattr(weights, item.attr_name, value.to(item.dtype))
    weights._post_process_after_load(getter)


def _module(name: str, **members: Any) -> ModuleType:
    made = sys.modules[name] = ModuleType(name)
    made.__dict__.update(members)
    return made


@cache
def stand_ins() -> None:
    """Put what runs on a CPU in the place of what needs a GPU; swiftLLM is imported here."""
    root = Path(os.environ["SWIFTLLM"]).resolve()
    _module("swiftllm", __path__=[str(root / "swiftllm")])  # whose own beginning imports the tokenizer
    _module("swiftllm_c", swap_blocks=swift_kernels.swap_blocks)
    _module("vllm_flash_attn", flash_attn_varlen_func=swift_kernels.flash_attention)
    _module("swiftllm.server.tokenization_engine").TokenizationEngine = type(  # type: ignore[attr-defined]
        "TokenizationEngine", (), {"remote": lambda _: None}
    )
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = torch.cuda.default_stream = _Stream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment,misc,return-value]
    swift_kernels.put()
    importlib.import_module("swiftllm.worker.weight").WeightBase.load_weights = _load  # type: ignore[attr-defined]
    importlib.import_module("swiftllm.worker.model").LlamaModel.profile_num_blocks = lambda _: SETUP.blocks  # type: ignore[attr-defined]


def _config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": SETUP.layers,
        "num_attention_heads": SETUP.heads,
        "num_key_value_heads": SETUP.kv_heads,
        "hidden_size": SETUP.heads * SETUP.dim,
        "intermediate_size": 256,  # in pieces of which its kernel works
        "vocab_size": VOCAB,
        "max_position_embeddings": SETUP.longest,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }


class Engine:
    vocab_size, max_len = VOCAB, 60

    def __init__(self, trace: Path) -> None:
        stand_ins()
        sys.modules["swiftllm_c"].swap_blocks = swift_kernels.swap_blocks  # type: ignore[attr-defined]  # that of an engine before was recorded
        self.begun()
        sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
        self.structs = importlib.import_module("swiftllm.server.structs")
        self.work = asyncio.new_event_loop()
        asyncio.set_event_loop(self.work)
        self.work.set_default_executor(_Inline())
        with tempfile.TemporaryDirectory() as folder, _OnHost():
            Path(folder, "config.json").write_text(json.dumps(_config()))
            config = importlib.import_module("swiftllm.engine_config").EngineConfig(
                model_path=folder,
                use_dummy=True,
                block_size=SETUP.block,
                gpu_mem_utilization=1.0,
                num_cpu_blocks=SETUP.host,
                max_seqs_in_block_table=ROWS,
                max_blocks_per_seq=SETUP.longest // SETUP.block,
                max_batch_size=SETUP.running,
                max_tokens_in_batch=SETUP.tokens,
            )
            self.engine = importlib.import_module("swiftllm.server.engine").Engine(config)
            self.work.run_until_complete(self.engine.initialize())
        self.model, self.scheduler = self.engine.model, self.engine.scheduler
        for manager in (self.model.gpu_block_manager, self.model.cpu_block_manager):
            manager.block_table = torch.zeros_like(manager.block_table)  # as fresh memory of a GPU is
        self.requests: dict[str, Any] = {}
        self.waiting: list[tuple[str, list[int], int]] = []
        self.recorder = importlib.import_module("record_swiftllm").attach(self.engine, trace, strict=True)
        forward, next_batch = self.model._forward, self.scheduler.get_next_batch
        self.turns, self.idle = 0, asyncio.Event()

        def shown(input_ids: Tensor, infer_state: Any) -> Tensor:
            self._show(input_ids, infer_state)
            return forward(input_ids, infer_state)

        def gated() -> Any:
            if not self.turns:
                self.idle.set()
                return [], [], []
            self.turns -= 1
            return next_batch()

        self.model._forward, self.scheduler.get_next_batch = shown, gated
        self.loop = self.work.create_task(self.engine._main_event_loop())

    @staticmethod
    def begun() -> None:
        """What is done when swiftLLM has been imported."""

    def _show(self, input_ids: Tensor, state: Any) -> None:
        from kvcanary import KvTensor

        if not state.batch_size:
            return
        lens = state.prefill_seq_lens if state.num_prefill_seqs else state.decoding_seq_lens
        table, rows = self.model.gpu_block_manager.block_table, state.seq_ids.long()
        tables, prompts = table[rows], bool(state.num_prefill_seqs)
        positions = torch.cat([torch.arange(length) for length in lens.tolist()]) if prompts else lens - 1
        right = positions.clone()
        self.on_inputs(
            {
                "input_ids": input_ids,
                "positions": positions,
                "prefix_lens": [0] * len(lens) if prompts else (lens - 1).tolist(),
                "extend_lens": lens.tolist() if prompts else [1] * len(lens),
                "seq_lens": lens,
                "block_tables": tables,
                "block_size": SETUP.block,
                "K": KvTensor(tensor=self.model.k_cache[:, 0], axes="block head slot dim"),
                "V": KvTensor(tensor=self.model.v_cache[:, 0], axes="block head slot dim"),
            }
        )
        table[rows] = tables
        if (positions != right).any():  # the model gets their angles
            state.position_cos, state.position_sin = (
                self.model._cos_cached[positions],
                self.model._sin_cached[positions],
            )

    def on_inputs(self, inputs: dict[str, Any]) -> None: ...

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        self.waiting.append((name, prompt, new_tokens))

    @property
    def answers(self) -> dict[str, list[int]]:
        return {name: request.output_token_ids for name, request in self.requests.items()}

    def step(self) -> bool:
        for name, prompt, new_tokens in self.waiting:
            request = self.requests[name] = self.structs.Request(self.structs.RawRequest("", new_tokens))
            request.prompt_token_ids, request.prompt_len = list(prompt), len(prompt)  # as the tokenizer does
            self.scheduler.on_requests_arrival([request])
        self.waiting.clear()
        self.turns, self.idle = 1, asyncio.Event()
        with _OnHost():
            idle = self.work.create_task(self.idle.wait())
            self.work.run_until_complete(asyncio.wait((self.loop, idle), return_when=asyncio.FIRST_COMPLETED))
        if self.loop.done():
            self.loop.result()
        return any(not request.is_finished() for request in self.requests.values())

    def close(self) -> None:
        self.loop.cancel()
        self.work.run_until_complete(asyncio.sleep(0))
        self.work.close()
        self.recorder.close()

    @property
    def _decoding(self) -> list[Any]:
        running = [req for req in self.scheduler.running_q if req.output_token_ids]
        return [req for req in running if req.output_len - len(req.output_token_ids) > 4]

    @torch.inference_mode()
    def fault_freed_too_early(self) -> bool:
        """A running request's block is free."""
        manager = self.model.gpu_block_manager
        for req in self._decoding:
            manager._free_blocks(manager.block_table[req.request_id, :1].long())
            return True
        return False

    def fault_leaked(self) -> bool:
        """A request forgets its last block."""
        for req in self.scheduler.running_q:
            if req.output_token_ids and len(req.output_token_ids) + 1 == req.output_len:
                return self._forgets(self.model.gpu_block_manager)
        return False

    def _forgets(self, manager: Any) -> bool:
        free = manager.free_blocks_for_seqs

        @torch.inference_mode()
        def forget(seqs: Tensor) -> None:
            manager.num_seq_allocated_blocks[seqs.long()[:1]] -= 1
            manager.free_blocks_for_seqs = free if len(seqs) else forget
            free(seqs)

        manager.free_blocks_for_seqs = forget
        return True

    def fault_swapped_in_wrong_order(self) -> bool:
        """What is swapped in comes in another order."""
        if len(self.scheduler.swapped_q) and self.scheduler.swapped_q[0].prompt_len > SETUP.block:
            module = sys.modules["swiftllm_c"]
            swap = module.swap_blocks

            def turned(src: list[int], dst: list[int], swap_in: bool, *pools: Tensor) -> None:
                module.swap_blocks = swap if swap_in and src else turned
                swap(src[::-1] if swap_in else src, dst, swap_in, *pools)

            module.swap_blocks = turned
            return True
        return False
