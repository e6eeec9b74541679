"""The runs of the matrix: how the engine is set up, which fault is injected into it, and the seed."""

import itertools
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run the engine; `arguments` go to vLLM as they are, `spawned` puts the engine core into its own process.

    `connector` is the configuration of a KV connector that loads, `embeddings` feeds some prompts as embeddings.
    """

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    spawned: bool = False
    sweep: int = 0
    connector: dict[str, Any] | None = None
    embeddings: bool = False


FEW_BLOCKS = {"num_gpu_blocks_override": 9}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
}
HOST = {
    "kv_connector": "HostConnector",
    "kv_connector_module_path": "host_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def host(**options: Any) -> dict[str, Any]:
    """Return the configuration of the connector in host_connector.py."""
    return {**HOST, "kv_connector_extra_config": options}


OFFLOADS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "host_offloading",
        "cpu_bytes_to_use": 1 << 27,
    },
}
OWN = {**OFFLOADS, "kv_connector": "OwnOffloading", "kv_connector_module_path": "host_offloading"}
FILES = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
WHOLE_PROMPTS = {"enable_prefix_caching": False, "max_num_batched_tokens": 1024, "enable_chunked_prefill": False}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of vLLM's `MultiConnector` over others."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


EAGLE = {"speculative_config": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3}}
DRAFT = {"speculative_config": {"method": "draft_model", "model": "llama", "num_speculative_tokens": 3}}
BF16 = {"dtype": "bfloat16"}
EMBEDDINGS = {"enable_prompt_embeds": True}
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
    # Short convolutions beside attention: a state for each block of tokens, or for each request.
    "recurrent": Setup(model="lfm2"),
    "recurrent-nocache": Setup(model="lfm2", arguments={"enable_prefix_caching": False}),
    "recurrent-preempt": Setup(model="lfm2", arguments={"num_gpu_blocks_override": 22}),
    "recurrent-async": Setup(model="lfm2", arguments={"async_scheduling": True}),
    # Gated delta nets beside attention.
    "delta": Setup(model="qwen3_next", arguments=BF16),
    "delta-nocache": Setup(model="qwen3_next", arguments={**BF16, "enable_prefix_caching": False}),
    "delta-preempt": Setup(model="qwen3_next", arguments={**BF16, "num_gpu_blocks_override": 22}),
    "delta-async": Setup(model="qwen3_next", arguments={**BF16, "async_scheduling": True}),
    # A draft model whose layers share the target's blocks.
    "llama-eagle": Setup(model="llama", arguments={**EAGLE, "max_num_batched_tokens": 64}, sweep=3),
    "llama-eagle-preempt": Setup(
        model="llama", arguments={**EAGLE, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 12}
    ),
    "llama-eagle-async": Setup(
        model="llama", arguments={**EAGLE, "max_num_batched_tokens": 64, "async_scheduling": True}
    ),
    "llama-draft-model": Setup(model="llama", arguments={**DRAFT, "max_num_batched_tokens": 64}),
    # What a KV connector loads: before the forward or beside it, in part, and failing.
    "llama-loads": Setup(model="llama", connector=host(when="sync"), sweep=3),
    "llama-loads-beside": Setup(model="llama", connector=host(when="async")),
    "llama-loads-in-part": Setup(model="llama", connector=host(when="both", most_blocks=1), arguments=FEW_BLOCKS),
    "llama-loads-fail": Setup(model="llama", connector=host(when="both", fail_every=2)),
    "llama-loads-nocache": Setup(
        model="llama", connector=host(when="both"), arguments={"enable_prefix_caching": False}
    ),
    "llama-loads-async": Setup(
        model="llama", connector=host(when="both", fail_every=3), arguments={"async_scheduling": True}
    ),
    "hybrid-loads": Setup(model="hybrid", connector=host(when="both")),
    "llama-loads-spawned": Setup(model="llama", connector=host(when="both"), spawned=True),
    "llama-shared-storage": Setup(model="llama", connector=FILES, arguments=WHOLE_PROMPTS),
    # vLLM's own offloading, whose copies are torch's here.
    "llama-offloads": Setup(model="llama", connector=OFFLOADS),
    "llama-offloads-preempt": Setup(model="llama", connector=OFFLOADS, arguments=FEW_BLOCKS),
    "hybrid-offloads": Setup(model="hybrid", connector=OFFLOADS),
    # Several connectors: all of them store, one of them loads.
    "llama-several": Setup(model="llama", connector=several(OFFLOADS, host(when="both"))),
    "llama-several-files": Setup(model="llama", connector=several(FILES, OFFLOADS), arguments=WHOLE_PROMPTS),
    "hybrid-several": Setup(model="hybrid", connector=several(host(when="both", most_blocks=1), OFFLOADS)),
    # Connectors that the recorder does not know: by the bytes that land.
    "llama-unknown": Setup(model="llama", connector=OWN),
    "llama-unknown-loads": Setup(
        model="llama", connector={**host(when="both", fail_every=3), "kv_connector": "SilentConnector"}
    ),
    "hybrid-unknown": Setup(model="hybrid", connector={**host(when="both"), "kv_connector": "SilentConnector"}),
    "llama-unknown-spawned": Setup(
        model="llama", connector={**host(when="both"), "kv_connector": "SilentConnector"}, spawned=True
    ),
    "llama-embeddings": Setup(model="llama", arguments=EMBEDDINGS, embeddings=True),
    "llama-embeddings-preempt": Setup(model="llama", arguments={**EMBEDDINGS, **FEW_BLOCKS}, embeddings=True),
    # The engine core in its own process, and the model in another: on the CPU vLLM does it no other way.
    "llama-spawned": Setup(model="llama", spawned=True),
    "hybrid-async-spawned": Setup(model="hybrid", arguments={"async_scheduling": True}, spawned=True),
    # Positions of several dimensions.
    "mrope": Setup(model="mrope"),
    "mrope-async-preempt": Setup(model="mrope", arguments={"async_scheduling": True, **FEW_BLOCKS}),
}
if find_spec("lmcache") is not None:
    LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    SETUPS["llama-lmcache-unknown"] = Setup(model="llama", connector=LMCACHE)
OFFLOADING_FAULTS = (
    *("store_wrong", "store_twice", "key_collides", "load_elsewhere", "load_other_block", "load_layout", "load_late"),
)
DRAFT_FAULTS = (
    *("draft_slot", "draft_position", "draft_step_position", "draft_seq_lens", "draft_slot_mapping", "draft_table"),
    *("draft_token", "draft_lost_write"),
)
FILE_FAULTS = ("store_wrong", "key_collides", "load_other_block", "load_layout")
FAULTS = {
    "llama": (
        *("block_table", "slot_mapping", "token", "position", "kv_byte", "attention_prefix", "attention_table"),
        *("late_layer", "nan_value"),
    ),
    "llama-eagle": DRAFT_FAULTS,
    "llama-draft-model": DRAFT_FAULTS[1:6],
    "llama-loads": ("block_table", "slot_mapping", "token", "kv_byte"),
    "llama-offloads": OFFLOADING_FAULTS,
    "llama-several": OFFLOADING_FAULTS,
    "llama-unknown": OFFLOADING_FAULTS[1:],  # a wrong store is not seen, what comes of it is unknown
    "llama-shared-storage": FILE_FAULTS,
    "llama-several-files": FILE_FAULTS,
    "llama-async": ("block_table", "slot_mapping", "token"),
    "mrope": ("position", "slot_mapping"),
    "sliding": ("block_table", "slot_mapping", "kv_byte"),
    "recurrent": ("state_byte", "state_block", "state_begin", "state_copy"),
    "recurrent-nocache": ("state_byte", "state_block"),
    "delta": ("state_byte", "state_block", "state_begin", "state_copy"),
    "delta-nocache": ("state_byte", "state_block"),
    "hybrid-async": (
        "block_table",
        "slot_mapping",
        "token",
        "position",
        "kv_byte",
        "attention_prefix",
        "attention_table",
    ),
}
if "llama-lmcache-unknown" in SETUPS:
    FAULTS["llama-lmcache-unknown"] = ("key_collides", "load_missing")
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
