"""The small engines that faults are tried on: each runs some hundred forwards, in which its mechanisms come up."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from ...recorder.engines.simulated.config import EngineConfig
from ...recorder.engines.simulated.pd_pair import PairSettings
from ...recorder.engines.simulated.requests import RequestSpec
from ...recorder.engines.simulated.workloads import RandomWorkload

# What every configuration has in common, unless it says otherwise.
_ENGINE: Final[dict[str, Any]] = {
    "page_size": 4,
    "num_pages": 130,
    "rows": 9,
    "width": 168,
    "max_running": 6,
    "chunk_tokens": 48,
    "graph_batch_sizes": (1, 2, 4, 8),
}
_WORKLOAD: Final[dict[str, Any]] = {
    "requests": 24,
    "prompt_tokens": 44,
    "output_tokens": 16,
    "max_tokens": 150,
    "sharing": 0.6,
    "num_prefixes": 3,
    "arrival_rate": 120.0,
    "abort_rate": 0.05,
}
# Long answers, so that the decode side has somebody to mix up.
_PAIR_WORKLOAD: Final[dict[str, Any]] = {"requests": 20, "output_tokens": 24, "arrival_rate": 200.0}
_PAIR: Final = PairSettings(max_steps=6, failure_rate=0.1)


@dataclass(frozen=True, slots=True)
class Configuration:
    """An engine and a workload, as far as they differ from the common ones; `repeat`: how often each request comes."""

    name: str
    summary: str
    _: KW_ONLY
    engine: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    repeat: int = 1
    pair: PairSettings | None = None

    def engine_config(self, seed: int) -> EngineConfig:
        """Return the engine of a seed."""
        return EngineConfig(seed=seed, **{**_ENGINE, **self.engine})

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield the requests of a seed."""
        common = _WORKLOAD if self.pair is None else _WORKLOAD | _PAIR_WORKLOAD
        for spec in RandomWorkload(seed=seed, **{**common, **self.workload}):
            yield from [spec] * self.repeat


_SWA: Final[dict[str, Any]] = {"shape": "swa", "window": 16, "swa_num_pages": 70}
_TWINS: Final[dict[str, Any]] = {"sampler": "content", "num_pages": 300, "chunk_tokens": 96}
_TWIN_WORKLOAD: Final[dict[str, Any]] = {"requests": 12, "prompt_tokens": 30, "sharing": 0.8}
_SWEPT: Final[dict[str, Any]] = {"sweep_interval": 5, "num_pages": 200}

_CONFIGURATIONS: Final = (
    Configuration("mha", "K and V, pages of 4, prefix cache with evictions, chunked prefill"),
    Configuration(
        "mha_page1",
        "pages of one token, first in first out",
        engine={"page_size": 1, "num_pages": 520, "free_order": "fifo"},
    ),
    Configuration(
        "mha_page16",
        "pages of 16, in no order",
        engine={"page_size": 16, "num_pages": 44, "width": 176, "free_order": "shuffled"},
        workload={"prompt_tokens": 60},
    ),
    Configuration("mla", "K only", engine={"shape": "mla"}),
    Configuration("adapters", "two LoRA adapters over one model", workload={"adapters": 2, "sharing": 0.9}),
    Configuration(
        "recurrent",
        "layers with recurrent state beside attention, checkpoints in the prefix cache",
        engine={"recurrent": True, "page_size": 1, "num_pages": 520},
        workload={"sharing": 0.9, "fork_rate": 0.2},
    ),
    Configuration("mixed", "prefill forwards carry decodes", engine={"mixed": True}),
    Configuration("no_cache", "no prefix cache", engine={"prefix_cache": False}),
    Configuration(
        "tight",
        "hardly enough memory: retraction, resume, preemption",
        engine={"num_pages": 62, "max_running": 5},
        workload={"priorities": 2, "arrival_rate": 1000.0, "output_tokens": 24, "requests": 20},
    ),
    Configuration("forks", "requests that want several answers", workload={"fork_rate": 0.4, "requests": 16}),
    Configuration(
        "host",
        "evicted pages go to a host tier and are loaded back",
        engine={"num_pages": 70, "host_pages": 200, "max_running": 4},
        workload={"sharing": 0.9},
    ),
    Configuration(
        "twins",
        "each prompt twice at once, equal answers: pages are de-duplicated",
        engine=_TWINS,
        workload=_TWIN_WORKLOAD,
        repeat=2,
    ),
    Configuration(
        "twins_swa",
        "the same over sliding-window layers",
        engine={**_TWINS, "shape": "swa", "window": 16},
        workload=_TWIN_WORKLOAD,
        repeat=2,
    ),
    Configuration("swa", "full and sliding-window layers", engine=_SWA),
    Configuration(
        "swa_page1",
        "full and sliding-window layers, pages of one token",
        engine={"shape": "swa", "window": 24, "page_size": 1, "num_pages": 520, "swa_num_pages": 260},
    ),
    Configuration("dsv4", "sliding window only, K only, no KV bytes", engine={**_SWA, "shape": "dsv4"}),
    Configuration("eagle", "speculative decoding, three guesses a round", engine={"eagle": True}),
    Configuration(
        "eagle_swa",
        "speculative decoding over sliding-window layers",
        engine={**_SWA, "eagle": True, "swa_num_pages": 80, "draft_tokens": 2},
    ),
    Configuration("sweeps", "the prefix cache is swept every five forwards", engine=_SWEPT),
    Configuration("sweeps_swa", "the same over sliding-window layers", engine={**_SWA, **_SWEPT, "swa_num_pages": 120}),
    Configuration("sweeps_eagle", "the same with a draft model", engine={**_SWEPT, "sweep_interval": 8, "eagle": True}),
    Configuration(
        "submitted",
        "what the model hands to the pools is recorded beside what they hold",
        engine={**_SWA, "submitted": True},
    ),
    Configuration(
        "layers",
        "four layers, of which other bytes are sampled in each slot",
        engine={"sampled_layers": 4, "sweep_interval": 7},
    ),
    Configuration(
        "told_reads",
        "sliding window only; what attention reads is recorded in place of req_to_token",
        engine={**_SWA, "shape": "dsv4", "reads_given": True},
    ),
    Configuration("overlap", "a forward is launched before the one before it is heard of", engine={"overlap": True}),
    Configuration(
        "overlap_swa", "the same over sliding-window layers", engine={**_SWA, "overlap": True, "mixed": True}
    ),
    Configuration("pd", "a prefill and a decode engine", pair=_PAIR),
    Configuration("pd_swa", "the same over sliding-window layers", engine=_SWA, pair=_PAIR),
    Configuration("pd_eagle", "the same with a draft model", engine={"eagle": True}, pair=_PAIR),
)

CONFIGURATIONS: Final = {configuration.name: configuration for configuration in _CONFIGURATIONS}
