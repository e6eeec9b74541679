"""Runs transformers' continuous batching with a tiny random model, step by step and the same each time.

The engine's loop runs in a thread of its own and takes requests as they come. Here requests come from inside that
loop, at a given step, so that every run batches alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvcanary.recorder.engines.transformers import TransformersAttachment, attach
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

VOCAB_SIZE = 512
PAGE_SIZE = 8

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}


def llama() -> PreTrainedConfig:
    """Return two full-attention layers."""
    return LlamaConfig(**_SHAPE, num_hidden_layers=2)


def qwen3() -> PreTrainedConfig:
    """Return three full-attention layers whose keys and queries are normed."""
    return Qwen3Config(**_SHAPE, num_hidden_layers=3)


def gemma3() -> PreTrainedConfig:
    """Return four layers, three of which see a sliding window of 32 tokens."""
    layer_types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        **_SHAPE, num_hidden_layers=4, layer_types=layer_types, sliding_window=32, query_pre_attn_scalar=16
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that reaches the engine just before step `at_step`."""

    name: str
    prompt: list[int]
    new_tokens: int
    at_step: int = 0


def random_prompt(seed: int, length: int) -> list[int]:
    """Return `length` tokens drawn with their own seed."""
    drawn = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


@dataclass(slots=True, kw_only=True)
class Engine:
    """The running engine as a fault sees it; `step` counts the forwards that have begun."""

    processor: Any = None
    step: int = 0
    attachment: TransformersAttachment | None = None

    @property
    def batch(self) -> list[Any]:
        """The requests of the step that is about to run, with their `state` and `query_length`."""
        return list(self.processor.inputs_and_outputs.requests_in_batch)

    @property
    def allocators(self) -> list[Any]:
        """The cache's allocators, one for each pool group."""
        return list(self.processor.cache.cache_allocators.values())

    def mark(self, **truth: Any) -> None:
        """Write a fault's ground truth into the trace."""
        if self.attachment is not None and self.attachment.recorder is not None:
            self.attachment.recorder.mark("injected fault", truth)


@dataclass(slots=True, kw_only=True)
class Fault:
    """What is done to the engine: before it prepares a step's inputs, after that, or before the step runs.

    Each is called with the engine at every step; it decides itself whether this is the step.
    """

    before_prepare: Callable[[Engine], None] = field(default=lambda _: None)
    after_prepare: Callable[[Engine], None] = field(default=lambda _: None)
    before_step: Callable[[Engine], None] = field(default=lambda _: None)


def record(
    path: Path,
    config: PreTrainedConfig,
    requests: list[Request],
    *,
    fault: Fault | None = None,
    num_return_sequences: int = 1,
    all_layers: bool = False,
    **batching: Any,
) -> dict[str, list[int]]:
    """Run the requests through the engine, record it to `path`, and return each request's new tokens.

    Args:
        path: the trace; replaced if it exists.
        config: the model's.
        requests: what is asked, and when.
        fault: what goes wrong; None for a healthy run.
        num_return_sequences: answers to each request; those past the first are forks.
        all_layers: as `attach` has it; traces that are to be small have the first layer alone.
        batching: for `ContinuousBatchingConfig`.
    """
    torch.set_num_threads(1)  # sums in one order, the same each time
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.manual_seed(1)
    # Small batches, so that a torn copy of so short a trace still keeps something.
    with attach(path, compression="zstd", overwrite=True, flush_bytes=16 << 10, all_layers=all_layers) as attachment:
        engine = Engine(attachment=attachment)
        manager_context = model.continuous_batching_context_manager(
            generation_config=GenerationConfig(
                do_sample=num_return_sequences > 1, num_return_sequences=num_return_sequences, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE, use_cuda_graph=False, max_requests_per_batch=12, **batching
            ),
            timeout=60,
        )
        waiting = sorted(requests, key=lambda request: request.at_step)
        with _stepped(engine, fault or Fault()) as on_prepare, manager_context as manager:

            def add_due() -> None:
                while waiting and waiting[0].at_step <= engine.step:
                    due = waiting.pop(0)
                    manager.add_request(due.prompt, request_id=due.name, max_new_tokens=due.new_tokens)

            on_prepare.append(add_due)
            answers: dict[str, list[int]] = {}
            while len(answers) < len(requests) * num_return_sequences:
                result = manager.get_result(timeout=60)
                if result is None or result.error:
                    raise RuntimeError(f"the engine gave no answer: {result and result.error}")
                answers[result.request_id] = result.generated_tokens
    return answers


@contextmanager
def _stepped(engine: Engine, fault: Fault) -> Iterator[list[Callable[[], None]]]:
    """Call the fault around each step, outside of the recorder's own hooks: the recorder sees what the engine sees."""
    owner = ContinuousBatchProcessor
    prepare, step = owner.prepare_next_batch, owner._generation_step
    on_prepare: list[Callable[[], None]] = []

    def prepare_next_batch(processor: Any) -> bool:
        engine.processor = processor
        for call in on_prepare:
            call()
        fault.before_prepare(engine)
        ready: bool = prepare(processor)
        fault.after_prepare(engine)
        return ready

    def generation_step(processor: Any, model: Any) -> None:
        fault.before_step(engine)
        step(processor, model)
        engine.step += 1

    owner.prepare_next_batch, owner._generation_step = prepare_next_batch, generation_step
    try:
        yield on_prepare
    finally:
        owner.prepare_next_batch, owner._generation_step = prepare, step
