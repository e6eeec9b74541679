"""The runs of the matrix: model, fault, page size, seed."""

import itertools
from dataclasses import dataclass

from inside import INSIDE

MODELS = ("llama", "mellum_hybrid")
# fault -> probability a step, and how often the prefix cache is swept
FAULTS = {
    "none": (0.0, 4),
    "REQ_TO_TOKEN": (0.4, 0),
    "REAL_KV_USED": (0.4, 0),
    "REAL_KV_POST_FORWARD": (0.4, 3),
    "REAL_KV_UNUSED_CACHE": (0.8, 2),
    # of inside.py
    "AFTER_TAIL": (0.4, 3),
    "TABLE_INSIDE": (0.4, 0),
    "SEQ_LENS": (0.3, 0),
    "ATTENTION_TABLE": (0.3, 0),
}
KV_FAULTS = ("REAL_KV_USED", "REAL_KV_POST_FORWARD", "REAL_KV_UNUSED_CACHE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One run of the engine."""

    model: str
    fault: str
    group: str
    page_size: int
    seed: int
    overlap: bool = False

    @property
    def name(self) -> str:
        group = f"-{self.group}" if self.group != "full" else ""
        overlap = "-overlap" if self.overlap else ""
        return f"{self.model}-{self.fault}{group}-page{self.page_size}-seed{self.seed}{overlap}"

    @property
    def retracts(self) -> bool:
        """Whether the engine retracts a request every few steps; every second seed."""
        return self.seed % 2 == 0

    @property
    def max_total_tokens(self) -> int:
        """The KV pool's size; where requests are retracted it is so small that the cache is evicted, too.

        Not for hybrid models: SGLang's attention on the CPU indexes the smaller sliding-window pool with full slots, and
        ends with an IndexError where they are beyond it.
        """
        return 160 if self.retracts and self.model == "llama" else 512

    @property
    def sweep_interval(self) -> int:
        return FAULTS[self.fault][1]

    def environment(self) -> dict[str, str]:
        """What the engine's canary and fault injector read."""
        env = {
            "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1",
            "SGLANG_KV_CANARY_ENABLE_MHA_V": "1",
            "SGLANG_KV_CANARY_RING_CAPACITY": "1000000",
        }
        if FAULTS[self.fault][0] and self.fault not in INSIDE:
            env[f"SGLANG_KV_CANARY_PERTURB_{self.fault}_PROB"] = str(FAULTS[self.fault][0])
            env["SGLANG_KV_CANARY_PERTURB_TARGET_GROUP"] = self.group
            env["SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS"] = "4"
        return env


def matrix(seeds: int) -> list[Configuration]:
    """Every model with every fault in each of its groups, page sizes 1 and 4; every third seed with the overlap scheduler."""
    runs = []
    for model, fault, page_size, seed in itertools.product(MODELS, FAULTS, (1, 4), range(1, seeds + 1)):
        groups = ("full", "swa") if model == "mellum_hybrid" and fault in KV_FAULTS else ("full",)
        runs += [
            Configuration(model=model, fault=fault, group=group, page_size=page_size, seed=seed, overlap=seed % 3 == 0)
            for group in groups
        ]
    return runs
