"""The runs of the matrix: how the engine is set up, which fault is injected into it, and the seed."""

import itertools
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run the engine; `arguments` go to vLLM as they are, `spawned` puts the engine core into its own process."""

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    spawned: bool = False
    sweep: int = 0


FEW_BLOCKS = {"num_gpu_blocks_override": 9}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
}
# All of them run prompts in chunks of at most 48 tokens.
SETUPS = {
    "llama": Setup(model="llama", sweep=3),
    "llama-nocache": Setup(model="llama", arguments={"enable_prefix_caching": False}),
    "llama-preempt": Setup(model="llama", arguments=FEW_BLOCKS, sweep=5),
    "llama-preempt-nocache": Setup(model="llama", arguments={**FEW_BLOCKS, "enable_prefix_caching": False}),
    "llama-async": Setup(model="llama", arguments={"async_scheduling": True}),
    "llama-async-preempt": Setup(model="llama", arguments={"async_scheduling": True, **FEW_BLOCKS}),
    "llama-ngram": Setup(model="llama", arguments=NGRAM),
    "sliding": Setup(model="sliding", sweep=3),
    "sliding-nocache": Setup(model="sliding", arguments={"enable_prefix_caching": False}),
    "sliding-async-preempt": Setup(model="sliding", arguments={"async_scheduling": True, **FEW_BLOCKS}),
    "hybrid": Setup(model="hybrid", sweep=3),
    "hybrid-nocache": Setup(model="hybrid", arguments={"enable_prefix_caching": False}),
    "hybrid-preempt": Setup(model="hybrid", arguments={"num_gpu_blocks_override": 22}),
    "hybrid-async": Setup(model="hybrid", arguments={"async_scheduling": True}),
    # The engine core in its own process, and the model in another: on the CPU vLLM does it no other way.
    "llama-spawned": Setup(model="llama", spawned=True),
    "hybrid-async-spawned": Setup(model="hybrid", arguments={"async_scheduling": True}, spawned=True),
}
FAULTS = {
    "llama": ("block_table", "slot_mapping", "token", "position", "kv_byte"),
    "llama-async": ("block_table", "slot_mapping", "token"),
    "sliding": ("block_table", "slot_mapping", "kv_byte"),
    "hybrid-async": ("block_table", "slot_mapping", "token", "position", "kv_byte"),
}
SPAWNED_FAULTS = (("llama-spawned", "slot_mapping"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the engine: a setup's name, a fault or "none", a seed."""

    setup: str
    fault: str
    seed: int
    recorded: bool = True

    @property
    def name(self) -> str:
        unrecorded = "" if self.recorded else "-unrecorded"
        return f"{self.setup}-{self.fault}-seed{self.seed}{unrecorded}"


def matrix(seeds: int) -> list[Run]:
    """Every setup without a fault, and every fault in some of them with each seed."""
    clean = [Run(setup=setup, fault="none", seed=1 + number) for number, setup in enumerate(SETUPS)]
    faulty = [
        Run(setup=setup, fault=fault, seed=seed)
        for setup, faults in FAULTS.items()
        for fault, seed in itertools.product(faults, range(1, seeds + 1))
    ]
    return clean + faulty + [Run(setup=setup, fault=fault, seed=1) for setup, fault in SPAWNED_FAULTS]
