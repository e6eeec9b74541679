"""The engines that the differential test runs: every pool shape, every mode, small enough for a plain Python canary."""

from typing import Any

from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload

FORWARDS = 20

_BASE: dict[str, Any] = {
    "num_pages": 120,
    "rows": 6,
    "width": 64,
    "kv_bytes_per_token": 32,
    "chunk_tokens": 16,
    "max_running": 4,
    "vocab_size": 97,
    "sampler": "random",
    "graph_batch_sizes": (2, 4),
    "window": 6,
}
_WORK: dict[str, Any] = {
    "requests": 7,
    "prompt_tokens": 9,
    "output_tokens": 6,
    "max_tokens": 34,
    "sharing": 0.6,
    "num_prefixes": 2,
    "arrival_rate": 120.0,
    "vocab_size": 97,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "mha": {"sweep_interval": 3, "sampler": "oracle"},
    "mha_pages": {"page_size": 4, "num_pages": 40, "free_order": "fifo", "sweep_interval": 2, "overlap": True},
    "mha_mixed": {"mixed": True, "chunk_tokens": 7, "sampler": "content"},
    "mha_no_cache": {"prefix_cache": False, "graph_batch_sizes": (3, 6)},
    "mha_forks": {"page_size": 4, "num_pages": 60, "fork_rate": 0.6},
    "mha_host": {
        "num_pages": 44,
        "host_pages": 60,
        "requests": 12,
        "sharing": 0.9,
        "num_prefixes": 1,
        "sweep_interval": 4,
    },
    "mha_tight": {"num_pages": 46, "priorities": 3, "abort_rate": 0.3, "sampler": "oracle", "overlap": True},
    "mha_whole_slots": {"kv_bytes_per_token": 16, "kv_hash": "ALL"},
    "mha_no_bytes_looked_at": {"kv_hash": "NONE"},
    "mla": {"shape": "mla", "idle_forwards": True, "arrival_rate": 20.0, "sweep_interval": 3, "sampler": "oracle"},
    "mla_host_pages": {"shape": "mla", "page_size": 4, "num_pages": 12, "host_pages": 20, "requests": 12},
    "swa": {"shape": "swa", "sweep_interval": 2, "sampler": "oracle"},
    "swa_pages": {
        "shape": "swa",
        "page_size": 4,
        "num_pages": 40,
        "swa_num_pages": 12,
        "chunk_tokens": 8,
        "sweep_interval": 3,
        "free_order": "shuffled",
    },
    "swa_mixed_forks": {"shape": "swa", "mixed": True, "chunk_tokens": 7, "page_size": 2, "fork_rate": 0.5},
    "dsv4": {"shape": "dsv4", "noise": False, "sweep_interval": 3},
    "dsv4_pages": {"shape": "dsv4", "page_size": 4, "num_pages": 40, "window": 9, "overlap": True},
    "eagle_mha": {"eagle": True, "draft_tokens": 3, "sampler": "oracle"},
    "eagle_mla_pages": {
        "eagle": True,
        "shape": "mla",
        "page_size": 4,
        "num_pages": 40,
        "draft_tokens": 2,
        "sampler": "oracle",
        "sweep_interval": 4,
    },
    "eagle_swa": {
        "eagle": True,
        "shape": "swa",
        "draft_tokens": 2,
        "accept_rate": 0.9,
        "sampler": "oracle",
        "sweep_interval": 3,
    },
    "eagle_dsv4": {"eagle": True, "shape": "dsv4", "draft_tokens": 2},
    "eagle_host": {"eagle": True, "draft_tokens": 2, "num_pages": 56, "host_pages": 40, "requests": 12},
}


def config_and_workload(name: str, seed: int) -> tuple[EngineConfig, RandomWorkload, str]:
    """Return the named engine, its workload, and the KV hash mode to judge it with."""
    given = dict(CONFIGS[name])
    kv_hash = given.pop("kv_hash", "PARTIAL")
    of_workload = set(RandomWorkload.__dataclass_fields__) - {"seed", "vocab_size"}
    work = {**_WORK, **{key: given.pop(key) for key in list(given) if key in of_workload}}
    return EngineConfig(seed=seed, **{**_BASE, **given}), RandomWorkload(seed=seed, **work), kv_hash
