"""What vLLM is set up with for the corpus, each setup with what is asked of it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Batches = list[list[list[int]]]  # of prompts, one behind another
FEW = {"num_gpu_blocks_override": 9}
EAGLE = {"speculative_config": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3}}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
}
LOADS = {
    "kv_connector": "HostConnector",
    "kv_connector_module_path": "host_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"when": "sync"},
}
# Whose weights are made large enough for attention to be seen in the answers; where they are made up, it is not.
TELLING = (
    "qwen-oldest",
    "hybrid-loads-stages",
    "llama-eagle-loads",
    "delta-hits",
    "llama-strides",
    "sliding-offsets",
    "llama-streaming-turns",
    "delta-together",
    "sliding-loads-heads",
    "qwen-clamps",
    "qwen-embeds-modes",
    "llama-lora-cold",
    "qwen-loads-stops",
    "llama-yarn",
    "delta-handed",
    "qwen-narrow",
    "llama-loads-overlaps",
    "qwen-columns",
    "delta-turns",
    "qwen-loads-kernels",
    "llama-eagle-steps",
    "qwen-loads-slow",
    "hybrid-graphs",
    "hybrid-rings",
    "qwen-pushes",
    "qwen-halves",
    "llama-loads-holes",
    "qwen-loads-memories",
    "qwen-budgets",
    "llama-wraps",
    "hybrid-loads-late-stores",
    "hybrid-decodes",
    "delta-returns",
    "llama-loads-tails",
    "qwen-loads-fresh",
    "delta-waits",
    "qwen-rows",
    "qwen-uploads",
    "sliding-eagle-hits",
    "hybrid-interleaved",
    "hybrid-bursts",
    "qwen-ngram-tails",
    "qwen-loads-leaves",
    "llama-recycles",
    "mrope-interleaved",
    "delta-continues",
    "llama-eagle-names",
    "hybrid-alone",
    "llama-lora-shares",
    "delta-resets",
    "qwen-suspends",
    "llama-cohorts",
    "llama-eagle-warm",
    "llama-loads-replicas",
    "hybrid-frontiers",
    "llama-recomputes",
    "llama-eagle-slots",
    "recurrent-snapshots",
    "qwen-forks",
    "hybrid-loads-flags",
    "llama-trash",
    "sliding-budgets",
    "delta-idles",
    "llama-eagle-mixed",
    "qwen-loads-names",
    "sliding-guesses",
    "qwen-histories",
    "recurrent-refits",
    "llama-eagle-reserves",
    "qwen-loads-appends",
    "sliding-ragged",
    "delta-mixes",
    "qwen-embeds-pictures",
    "llama-loads-epochs",
    "qwen-embeds-albums",
    "recurrent-cancels",
    "llama-loads-binds",
    "delta-cancels",
    "llama-mirrors",
    "mrope-extends",
)
PICTURE = 9.0  # in the last dimension of what stands for a part of a picture, where a prompt has pictures


class Asked:
    """Seeded random prompts, half of which begin alike, and `again` some that go on behind them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.shared = self.tokens(70)
        self.prompts = [
            self.shared + self.tokens(rng.randrange(3, 30)) if i % 2 == 0 else self.tokens(rng.randrange(5, 60))
            for i in range(5)
        ]
        self.again = [
            self.prompts[0] + self.tokens(4),
            self.shared[:66],
            self.tokens(96),
            self.prompts[2],
            self.shared[:64],
        ]

    def tokens(self, count: int) -> list[int]:
        """Return that many new ones."""
        return [self._rng.randrange(3, 600) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run the engine: a model of the conformance runs, arguments beside the usual ones, what is asked, and how many
    `more` tokens than usual are answered.
    """

    model: str
    arguments: dict[str, Any]
    batches: Callable[[Asked], Batches]
    more: int


SETUPS: dict[str, Setup] = {}


def setup(
    name: str, model: str, arguments: dict[str, Any], more: int = 0
) -> Callable[[Callable[[Asked], Batches]], Callable[[Asked], Batches]]:
    """Make a setup of a function that says what is asked."""

    def make(batches: Callable[[Asked], Batches]) -> Callable[[Asked], Batches]:
        SETUPS[name] = Setup(model, arguments, batches, more)
        return batches

    return make


def usual(ask: Asked) -> Batches:
    """Prompts that begin alike, and some that go on behind them."""
    return [ask.prompts, ask.again]


for _name, _model, _arguments in (
    ("llama", "llama", {}),
    ("llama-churn", "llama", {"max_num_seqs": 3}),
    ("llama-preempt", "llama", FEW),
    ("llama-async", "llama", {"async_scheduling": True}),
    ("llama-async-preempt", "llama", {"async_scheduling": True, **FEW}),
    ("sliding", "sliding", {}),
    ("sliding-churn", "sliding", {"max_num_seqs": 3}),
    ("hybrid", "hybrid", {}),
    ("hybrid-preempt", "hybrid", {"num_gpu_blocks_override": 22}),
    ("llama-eagle", "llama", {**EAGLE, "max_num_batched_tokens": 64}),
    ("llama-loads", "llama", {"kv_transfer_config": LOADS}),
    ("llama-loads-salts", "llama", {"kv_transfer_config": LOADS}),
    ("llama-loads-wide", "llama", {"kv_transfer_config": LOADS, "max_num_batched_tokens": 128}),
    ("hybrid-loads", "hybrid", {"kv_transfer_config": LOADS}),
    (
        "llama-loads-late",
        "llama",
        {
            "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
            "num_gpu_blocks_override": 16,
            "max_num_seqs": 3,
        },
    ),
    ("llama-weights-running", "llama", {}),
    ("llama-streaming", "llama", {}),
    ("llama-page64", "llama", {"block_size": 64}),
    ("llama-salts", "llama", {}),
    ("llama-embeds", "llama", {"enable_prompt_embeds": True}),
    ("recurrent", "lfm2", {}),
    ("delta", "qwen3_next", {"dtype": "bfloat16"}),
    ("delta-preempt", "qwen3_next", {"dtype": "bfloat16", "num_gpu_blocks_override": 18}),
    ("llama-lora", "llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    ("llama-lora-mixed", "llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    ("llama-lora-salts", "llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    ("llama-lora-reload", "llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    ("llama-loads-weights", "llama", {"kv_transfer_config": LOADS}),
    ("mla", "mla", {"block_size": 16, "num_gpu_blocks_override": 128, "max_num_seqs": 4}),
    (
        "llama-lora-added",
        "llama",
        {
            "enable_lora": True,
            "max_loras": 2,
            "max_cpu_loras": 4,
            "max_lora_rank": 8,
            "max_num_batched_tokens": 96,
        },
    ),
    ("llama-sleeps", "llama", {"max_num_batched_tokens": 80, "block_size": 64}),
    ("llama-eagle-churn", "llama", {**EAGLE, "max_num_batched_tokens": 96, "max_num_seqs": 3}),
):
    setup(_name, _model, _arguments)(usual)


@setup("llama-few", "llama", {"num_gpu_blocks_override": 12, "max_num_seqs": 3})
@setup("llama-loads-few", "llama", {"kv_transfer_config": LOADS, "num_gpu_blocks_override": 14, "max_num_seqs": 3})
def few(ask: Asked) -> Batches:
    """Prompts that come again: what was cached is evicted while the last ones wait."""
    prompts, tokens = ask.prompts, ask.tokens
    return [prompts, ask.again, [tokens(100), tokens(98), tokens(101), prompts[0], prompts[2], tokens(40)]]


@setup("qwen-ngram", "qwen", {**NGRAM, "block_size": 64})
@setup("qwen-ngram-page32", "qwen", NGRAM)
@setup(
    "qwen-ngram-five",
    "qwen",
    {
        "speculative_config": {**NGRAM["speculative_config"], "num_speculative_tokens": 5},
        "num_gpu_blocks_override": 16,
        "max_num_seqs": 3,
    },
    more=30,
)
def guessed(ask: Asked) -> Batches:
    """Prompts of which one repeats itself, so that drafts have something to guess."""
    ask.prompts[1] = ask.tokens(6) * 6
    return [ask.prompts, ask.again]


@setup("llama-parts", "llama", {"max_num_seqs": 3})
def _llama_parts(ask: Asked) -> Batches:
    """Prompts: blocks that come again behind others, or at another place."""
    ask.prompts[3] = ask.tokens(80)
    ask.prompts[0] = ask.shared + ask.tokens(40)
    return [
        ask.prompts,
        [ask.shared[:32] + ask.prompts[3][32:64] + ask.tokens(20), ask.shared[32:64] + ask.tokens(40)],
        ask.again,
    ]


@setup("llama-loads-parts", "llama", {"kv_transfer_config": LOADS})
def _llama_loads_parts(ask: Asked) -> Batches:
    """Prompts that go apart inside a block."""
    return [ask.prompts, [ask.shared[:68] + ask.tokens(50), ask.shared[:68] + ask.tokens(44)], ask.again]


@setup("llama-loads-back", "llama", {"kv_transfer_config": LOADS, "num_gpu_blocks_override": 14, "max_num_seqs": 3})
def _llama_loads_back(ask: Asked) -> Batches:
    """Prompts that come again when all blocks have been written by others."""
    return [ask.prompts, [ask.tokens(100), ask.tokens(98), ask.tokens(101)], ask.again]


@setup("llama-loads-middle", "llama", {"kv_transfer_config": LOADS})
def _llama_loads_middle(ask: Asked) -> Batches:
    """Prompts that go on behind a block that is there already."""
    return [ask.prompts, [ask.shared[:40], ask.prompts[0] + ask.tokens(4), ask.prompts[2] + ask.tokens(3)], ask.again]


@setup("delta-units", "qwen3_next", {"dtype": "bfloat16", "prefix_match_unit": 16})
def _delta_units(ask: Asked) -> Batches:
    """Prompts that go on inside a block, behind a prompt that ends there."""
    ask.prompts[1] = ask.tokens(56)
    return [
        ask.prompts,
        [ask.prompts[1][:49] + ask.tokens(12), ask.prompts[1] + ask.tokens(20), ask.prompts[1][:50] + ask.tokens(5)],
        ask.again,
    ]


@setup("llama-loads-two", "llama", {"kv_transfer_config": LOADS})
def _llama_loads_two(ask: Asked) -> Batches:
    """Prompts that have nothing in common and come again together."""
    ask.prompts[1], ask.prompts[3] = ask.tokens(70), ask.tokens(75)
    return [ask.prompts, [ask.prompts[1] + ask.tokens(3), ask.prompts[3] + ask.tokens(5), *ask.again]]


@setup(
    "llama-loads-fails",
    "llama",
    {"kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "sync", "fail_every": 1}}},
)
def _llama_loads_fails(ask: Asked) -> Batches:
    """Prompts: one that loads, and one that joins it in the same step."""
    return [ask.prompts, [ask.shared + ask.tokens(3), ask.shared[:68] + ask.tokens(5)], ask.again]


@setup("llama-loads-alone", "llama", {"kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}}})
def _llama_loads_alone(ask: Asked) -> Batches:
    """Prompts: one that waits for its load while nothing else runs."""
    ask.prompts[1] = ask.tokens(70)
    return [ask.prompts, [ask.prompts[1] + ask.tokens(3)], ask.again]


@setup("llama-twins", "llama", {"num_gpu_blocks_override": 12, "max_num_seqs": 3})
def _llama_twins(ask: Asked) -> Batches:
    """Prompts: one that computes anew a block that is there already, and others that want all blocks."""
    return [ask.prompts, [ask.shared[:64], ask.tokens(100), ask.tokens(98)], ask.again]


@setup("llama-eagle-parts", "llama", {**EAGLE, "max_num_batched_tokens": 64})
def _llama_eagle_parts(ask: Asked) -> Batches:
    """Prompts that go apart right behind a block."""
    return [ask.prompts, [ask.shared[:64] + ask.tokens(20), ask.shared[:32] + ask.tokens(12)], ask.again]


@setup("hybrid-halves", "hybrid", {})
def _hybrid_halves(ask: Asked) -> Batches:
    """Prompts that go apart in the middle of a block."""
    return [ask.prompts, [ask.prompts[0][:48] + ask.tokens(30), ask.shared[:20] + ask.tokens(40)], ask.again]


@setup("recurrent-short", "lfm2", {})
def _recurrent_short(ask: Asked) -> Batches:
    """Prompts that have a token more than what they hit."""
    return [ask.prompts, [ask.shared[:65], ask.shared[:33]], ask.again]


@setup("recurrent-little", "lfm2", {})
def _recurrent_little(ask: Asked) -> Batches:
    """Prompts: the first of which fits in a block with its answer."""
    return [[ask.tokens(9), *ask.prompts], ask.again]


@setup("recurrent-together", "lfm2", {})
def _recurrent_together(ask: Asked) -> Batches:
    """Prompts: the second begins with what the first has just begun to compute."""
    ask.prompts[1] = ask.shared[:64] + ask.tokens(6)
    return [ask.prompts, ask.again]


@setup("llama-aborts", "llama", {"num_gpu_blocks_override": 11, "max_num_seqs": 3})
def _llama_aborts(ask: Asked) -> Batches:
    """Prompts: two that begin alike, one of which is aborted, and others that want all blocks."""
    return [
        [ask.shared + ask.tokens(6), ask.shared + ask.tokens(12), *(ask.tokens(80 + i) for i in range(5))],
        ask.again,
    ]


@setup("recurrent-ones", "lfm2", {})
def _recurrent_ones(ask: Asked) -> Batches:
    """Prompts of a single token, when others have used the slots."""
    return [ask.prompts, [ask.tokens(1), *ask.prompts[1:3], ask.tokens(1)], [ask.tokens(1)], ask.again]


@setup(
    "llama-lora-loads",
    "llama",
    {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "kv_transfer_config": LOADS, "max_num_seqs": 4},
)
def _llama_lora_loads(ask: Asked) -> Batches:
    """Prompts: for one tenant, for another, and for the first once more."""
    return [ask.prompts, ask.again, [ask.prompts[0] + ask.tokens(7), ask.shared[:68], ask.prompts[2] + ask.tokens(2)]]


@setup("mrope-chunks", "mrope", {"max_num_batched_tokens": 24, "block_size": 64, "max_num_seqs": 4})
def _mrope_chunks(ask: Asked) -> Batches:
    """Prompts that take many steps."""
    return [
        [ask.prompts[0], ask.tokens(90), ask.shared + ask.tokens(3)],
        ask.again,
        [ask.tokens(75), ask.shared[:50] + ask.tokens(40)],
    ]


@setup(
    "llama-loads-aborts",
    "llama",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "num_gpu_blocks_override": 12,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 160,
    },
)
def _llama_loads_aborts(ask: Asked) -> Batches:
    """Prompts: one that waits for its load, and one that waits for its blocks."""
    return [ask.prompts, [ask.prompts[0] + ask.tokens(3), ask.tokens(100), ask.tokens(60), ask.tokens(140)], ask.again]


@setup("delta-long", "qwen3_next", {"dtype": "bfloat16", "max_num_batched_tokens": 80, "max_num_seqs": 4})
def _delta_long(ask: Asked) -> Batches:
    """Prompts that fill several blocks, one behind another."""
    return [
        [ask.shared + ask.tokens(90), ask.tokens(150), ask.tokens(20)],
        [ask.shared + ask.tokens(60), ask.tokens(110), ask.shared[:66]],
    ]


@setup(
    "llama-chunks-back",
    "llama",
    {
        "num_gpu_blocks_override": 10,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 4,
    },
    more=30,
)
def _llama_chunks_back(ask: Asked) -> Batches:
    """Prompts that all grow together until there is no room."""
    return [
        [ask.shared, ask.tokens(50), ask.tokens(61), ask.tokens(44)],
        [ask.shared[:60] + ask.tokens(9), ask.tokens(70), ask.tokens(35)],
    ]


@setup(
    "llama-eagle-brim",
    "llama",
    {
        "speculative_config": {**EAGLE["speculative_config"], "num_speculative_tokens": 5},
        "max_num_batched_tokens": 160,
        "block_size": 64,
        "max_num_seqs": 4,
    },
)
def _llama_eagle_brim(ask: Asked) -> Batches:
    """Prompts that run until there is no place left in the longest context."""
    return [
        [ask.tokens(231), ask.tokens(90)],
        [ask.shared + ask.tokens(162), ask.shared + ask.tokens(170)],
        ask.again[1:4],
    ]


@setup(
    "hybrid-crowd",
    "hybrid",
    {"max_num_batched_tokens": 200, "num_gpu_blocks_override": 48, "max_num_seqs": 5, "block_size": 16},
)
def _hybrid_crowd(ask: Asked) -> Batches:
    """Prompts: several of which are computed in one step."""
    return [
        [ask.tokens(70), ask.shared + ask.tokens(9), ask.tokens(24), ask.tokens(38)],
        [ask.shared + ask.tokens(30), ask.tokens(85)],
        ask.again,
    ]


@setup(
    "sliding-tight",
    "sliding",
    {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 12, "max_num_seqs": 3, "block_size": 16},
    more=30,
)
def _sliding_tight(ask: Asked) -> Batches:
    """Prompts of many chunks, while there are no blocks to spare."""
    return [
        [ask.tokens(170), ask.tokens(130), ask.tokens(150)],
        [ask.tokens(190), ask.shared + ask.tokens(90), ask.tokens(120)],
    ]


@setup(
    "llama-loads-turns",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "num_gpu_blocks_override": 9,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 2,
    },
)
def _llama_loads_turns(ask: Asked) -> Batches:
    """Prompts: two that grow alike, and then go on where their answers end."""
    return [[ask.tokens(100), ask.tokens(100)], [ask.tokens(11), ask.tokens(6)], [ask.tokens(40)]]


@setup(
    "llama-loads-rest",
    "llama",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 72,
        "max_num_seqs": 1,
    },
)
def _llama_loads_rest(ask: Asked) -> Batches:
    """Prompts whose beginning is there when the rest of them comes."""
    longer = [ask.shared + ask.tokens(60), ask.tokens(45), ask.shared + ask.tokens(75)]
    return [longer, [ask.shared[:52], ask.tokens(30), longer[2] + ask.tokens(6), longer[0] + ask.tokens(9)]]


# A place for an adapter stays free: on the CPU requests without one get the last (docs/results/found.md).
@setup(
    "llama-lora-tight",
    "llama",
    {
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 8,
        "num_gpu_blocks_override": 12,
        "max_num_batched_tokens": 56,
        "max_num_seqs": 4,
    },
)
def _llama_lora_tight(ask: Asked) -> Batches:
    """Prompts of two tenants and of none, that all begin alike."""
    return [[ask.shared + ask.tokens(i + 3) for i in range(5)], [ask.shared[:50] + ask.tokens(9), *ask.again]]


@setup(
    "llama-loads-restart",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "num_gpu_blocks_override": 9,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 3,
    },
    more=30,
)
def _llama_loads_restart(ask: Asked) -> Batches:
    """Prompts: the third is long, and the others grow while it is computed."""
    longer = ask.shared + ask.tokens(33)
    return [[ask.tokens(52), ask.tokens(59), longer], [longer + ask.tokens(9), ask.tokens(40)], [ask.shared[:30]]]


@setup(
    "llama-loads-refused",
    "llama",
    {
        "kv_transfer_config": {
            **LOADS,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"when": "sync", "fail_every": 2},
        },
        "max_num_batched_tokens": 128,
        "max_num_seqs": 1,
    },
)
def _llama_loads_refused(ask: Asked) -> Batches:
    """Prompts: one after the other, that begin alike when the first ones have gone."""
    ask.prompts[1] = ask.tokens(75)
    return [
        ask.prompts,
        [ask.prompts[1] + ask.tokens(4), ask.shared + ask.tokens(3), ask.shared[:68] + ask.tokens(5), ask.tokens(20)],
    ]


@setup("hybrid-page16", "hybrid", {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4})
def _hybrid_page16(ask: Asked) -> Batches:
    """Prompts: some of which are longer than a window, and some come to be."""
    return [
        [ask.tokens(20), ask.shared + ask.tokens(12), ask.tokens(39)],
        [ask.shared + ask.tokens(2), ask.tokens(58), ask.shared[:30]],
    ]


@setup(
    "recurrent-back", "lfm2", {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 64, "max_num_seqs": 4}, more=30
)
def _recurrent_back(ask: Asked) -> Batches:
    """Prompts that grow until there is no room for all."""
    return [
        [ask.tokens(50), ask.tokens(61), ask.tokens(44), ask.tokens(57)],
        [ask.shared + ask.tokens(9), ask.tokens(70), ask.tokens(52)],
    ]


@setup("qwen-chunks", "qwen", {"max_num_batched_tokens": 40, "max_num_seqs": 3})
def _qwen_chunks(ask: Asked) -> Batches:
    """Prompts of several chunks each."""
    return [
        [ask.tokens(95), ask.tokens(33), ask.tokens(110)],
        [ask.shared + ask.tokens(50), ask.shared[:64] + ask.tokens(41), ask.tokens(12)],
    ]


@setup("qwen-suffixes", "qwen", {"max_num_batched_tokens": 96, "max_num_seqs": 5})
def _qwen_suffixes(ask: Asked) -> Batches:
    """Prompts of which some go on for long behind what they hit."""
    return [
        [ask.shared, ask.tokens(45), ask.shared[:20]],
        [ask.shared + ask.tokens(40), ask.shared[:66], ask.shared[:35] + ask.tokens(60)],
        ask.again,
    ]


@setup("qwen-resumes", "qwen", {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 56, "max_num_seqs": 4}, more=32)
def _qwen_resumes(ask: Asked) -> Batches:
    """Prompts that all grow until some are put back, and come to other rows."""
    return [
        [ask.tokens(33), ask.tokens(47), ask.tokens(26), ask.tokens(39)],
        [ask.shared[:48], ask.tokens(29), ask.shared[:37] + ask.tokens(8)],
    ]


@setup("hybrid-weights", "hybrid", {"max_num_batched_tokens": 112, "max_num_seqs": 4, "num_gpu_blocks_override": 80})
def _hybrid_weights(ask: Asked) -> Batches:
    """Prompts: turns of talks that go on under new weights."""
    longer = [ask.shared + ask.tokens(21), ask.tokens(83), ask.shared[:40] + ask.tokens(33)]
    return [
        longer,
        [longer[0] + ask.tokens(6), ask.tokens(30), longer[1] + ask.tokens(9)],
        [longer[2] + ask.tokens(14), ask.shared],
    ]


@setup(
    "delta-reused",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 72, "num_gpu_blocks_override": 11, "max_num_seqs": 2},
    more=32,
)
def _delta_reused(ask: Asked) -> Batches:
    """Prompts: two at a time, each of which gets what the ones before have left."""
    return [
        [ask.tokens(88), ask.tokens(41), ask.tokens(6), ask.tokens(52), ask.tokens(9)],
        [ask.tokens(12), ask.tokens(4), ask.shared + ask.tokens(3), ask.tokens(7), ask.tokens(5)],
        [ask.tokens(3), ask.tokens(5), ask.tokens(2), ask.tokens(8)],
    ]


@setup(
    "delta-churn",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 88, "num_gpu_blocks_override": 27, "max_num_seqs": 4},
    more=32,
)
def _delta_churn(ask: Asked) -> Batches:
    """Prompts that come and go while others are computed."""
    return [
        [ask.tokens(61), ask.tokens(90), ask.tokens(37), ask.tokens(72)],
        [ask.shared + ask.tokens(5), ask.tokens(49), ask.shared + ask.tokens(20)],
    ]


@setup(
    "qwen-loads-ends",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 96,
        "num_gpu_blocks_override": 40,
        "max_num_seqs": 3,
    },
)
def _qwen_loads_ends(ask: Asked) -> Batches:
    """Prompts that are gone on with behind answers, some of which end where a block does."""
    return [
        [ask.tokens(37), ask.tokens(50), ask.shared[:45]],
        [ask.tokens(5), ask.tokens(9), ask.tokens(7)],
        [ask.tokens(20), ask.tokens(41)],
    ]


@setup(
    "llama-loads-shifts",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 104,
        "num_gpu_blocks_override": 34,
        "max_num_seqs": 4,
    },
)
def _llama_loads_shifts(ask: Asked) -> Batches:
    """Prompts that go on at different lengths behind what has been asked before."""
    longer = [ask.shared + ask.tokens(18), ask.tokens(51), ask.shared[:58]]
    return [
        longer,
        [longer[0] + ask.tokens(40), longer[1] + ask.tokens(7), ask.tokens(22), ask.shared + ask.tokens(35)],
        ask.again[2:],
    ]


@setup(
    "sliding-block64",
    "sliding",
    {"block_size": 64, "max_num_batched_tokens": 76, "num_gpu_blocks_override": 20, "max_num_seqs": 3},
)
def _sliding_block64(ask: Asked) -> Batches:
    """Prompts of less than a window and of several."""
    return [
        [ask.tokens(17), ask.tokens(120), ask.tokens(44)],
        [ask.shared + ask.tokens(50), ask.tokens(26), ask.shared[:61]],
    ]


@setup(
    "qwen-strides",
    "qwen",
    {"block_size": 96, "max_num_batched_tokens": 60, "num_gpu_blocks_override": 22, "max_num_seqs": 4},
)
def _qwen_strides(ask: Asked) -> Batches:
    """Prompts that are computed in rows of two to four."""
    return [
        [ask.tokens(24), ask.tokens(51), ask.tokens(33), ask.tokens(12)],
        [ask.shared[:49], ask.tokens(38), ask.shared[:35] + ask.tokens(20)],
    ]


@setup(
    "llama-lora-chunks",
    "llama",
    {
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 8,
        "max_num_batched_tokens": 44,
        "num_gpu_blocks_override": 50,
        "max_num_seqs": 3,
    },
)
def _llama_lora_chunks(ask: Asked) -> Batches:
    """Prompts of one to four chunks, for two tenants and for none."""
    return [
        [ask.tokens(30), ask.shared + ask.tokens(31), ask.tokens(73)],
        [ask.shared + ask.tokens(8), ask.tokens(25), ask.tokens(90), ask.tokens(52)],
    ]


@setup(
    "hybrid-floors",
    "hybrid",
    {"block_size": 16, "max_num_batched_tokens": 52, "num_gpu_blocks_override": 22, "max_num_seqs": 3},
    more=32,
)
def _hybrid_floors(ask: Asked) -> Batches:
    """Prompts of one window to three, while others want the blocks that they leave."""
    return [
        [ask.tokens(90), ask.tokens(35), ask.tokens(50), ask.tokens(28), ask.tokens(61)],
        [ask.shared + ask.tokens(26), ask.tokens(58), ask.shared[:50]],
    ]


@setup("qwen-synced", "qwen", {"max_num_batched_tokens": 68, "num_gpu_blocks_override": 30, "max_num_seqs": 4})
def _qwen_synced(ask: Asked) -> Batches:
    """Prompts that begin alike before and behind new weights."""
    return [
        [ask.shared + ask.tokens(17), ask.tokens(40), ask.shared[:50]],
        [ask.shared + ask.tokens(25), ask.tokens(66), ask.tokens(21)],
        [ask.shared[:66] + ask.tokens(12), ask.tokens(19)],
    ]


@setup("recurrent-tails", "lfm2", {"max_num_batched_tokens": 56, "num_gpu_blocks_override": 36, "max_num_seqs": 3})
def _recurrent_tails(ask: Asked) -> Batches:
    """Prompts that end a few tokens behind a block, and are gone on with from that block's end."""
    return [
        [ask.shared + ask.tokens(9), ask.tokens(47)],
        [ask.shared[:64] + ask.tokens(20), ask.tokens(25)],
        [ask.tokens(36), ask.shared[:64] + ask.tokens(33)],
    ]


@setup(
    "qwen-loads-disk",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "block_size": 64,
        "max_num_batched_tokens": 116,
        "num_gpu_blocks_override": 24,
        "max_num_seqs": 3,
    },
)
def _qwen_loads_disk(ask: Asked) -> Batches:
    """Prompts of one block and a bit, or of two."""
    batches = [[ask.shared + ask.tokens(11), ask.tokens(133), ask.tokens(37)]]
    batches += [
        [ask.shared + ask.tokens(20), ask.tokens(30)],
        [batches[0][1] + ask.tokens(8), ask.shared[:66] + ask.tokens(70)],
    ]
    return batches


@setup(
    "llama-lora-prompts",
    "llama",
    {
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 8,
        "max_num_batched_tokens": 84,
        "num_gpu_blocks_override": 44,
        "max_num_seqs": 4,
    },
)
def _llama_lora_prompts(ask: Asked) -> Batches:
    """Prompts of two tenants and of none, some of which go on behind what they hit."""
    return [
        [ask.tokens(41), ask.shared + ask.tokens(6), ask.tokens(58)],
        [ask.shared + ask.tokens(17), ask.tokens(36), ask.shared + ask.tokens(28), ask.tokens(9)],
    ]


@setup(
    "qwen-loads-split",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 88,
        "num_gpu_blocks_override": 28,
        "max_num_seqs": 2,
    },
)
def _qwen_loads_split(ask: Asked) -> Batches:
    """Prompts that come again, and go on behind one block or two."""
    longer = [ask.shared + ask.tokens(15), ask.tokens(45), ask.tokens(99)]
    return [
        longer,
        [longer[0] + ask.tokens(7), longer[1][:36] + ask.tokens(30)],
        [longer[2] + ask.tokens(5), ask.tokens(28)],
    ]


@setup(
    "llama-loads-leases",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 120,
        "num_gpu_blocks_override": 26,
        "max_num_seqs": 3,
    },
)
def _llama_loads_leases(ask: Asked) -> Batches:
    """Prompts so many that what was kept first comes again when others have been kept since."""
    longer = [ask.shared + ask.tokens(8), ask.tokens(72), ask.tokens(100), ask.tokens(68)]
    return [
        longer[:2],
        longer[2:],
        [longer[0] + ask.tokens(4), longer[3] + ask.tokens(11)],
        [ask.tokens(31), longer[1]],
    ]


@setup("qwen-admits", "qwen", {"max_num_batched_tokens": 100, "num_gpu_blocks_override": 34, "max_num_seqs": 3})
def _qwen_admits(ask: Asked) -> Batches:
    """Prompts: one after another, while others are answered."""
    return [
        [ask.tokens(34), ask.tokens(27), ask.tokens(62), ask.tokens(41), ask.tokens(19)],
        [ask.shared[:45], ask.tokens(38), ask.shared[:32] + ask.tokens(22), ask.tokens(50)],
    ]


@setup(
    "qwen-loads-files",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 132,
        "num_gpu_blocks_override": 32,
        "max_num_seqs": 4,
    },
)
def _qwen_loads_files(ask: Asked) -> Batches:
    """Prompts of the first batch that come again when others have been kept in between."""
    longer = [ask.shared + ask.tokens(14), ask.tokens(84)]
    return [
        longer,
        [ask.tokens(76), ask.tokens(50), ask.tokens(39)],
        [longer[1] + ask.tokens(6), ask.tokens(23), ask.shared[:68] + ask.tokens(19)],
    ]


@setup(
    "llama-lora-guesses",
    "llama",
    {
        **NGRAM,
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 8,
        "max_num_batched_tokens": 92,
        "num_gpu_blocks_override": 46,
        "max_num_seqs": 4,
    },
)
def _llama_lora_guesses(ask: Asked) -> Batches:
    """Prompts of two tenants and of none that repeat themselves."""
    return [
        [ask.tokens(7) * 5, ask.shared + ask.tokens(4), ask.tokens(5) * 9, ask.tokens(31)],
        [ask.tokens(6) * 8, ask.tokens(48), ask.shared[:40] + ask.tokens(4) * 4],
    ]


@setup(
    "llama-cut-prompts",
    "llama",
    {"max_num_batched_tokens": 76, "num_gpu_blocks_override": 42, "max_num_seqs": 3},
)
def _llama_cut_prompts(ask: Asked) -> Batches:
    """Prompts of up to six blocks, and shorter ones that begin as they do."""
    longer = [ask.tokens(185), ask.shared + ask.tokens(92)]
    return [
        [*longer, ask.tokens(40)],
        [longer[0][:90] + ask.tokens(15), ask.tokens(27), longer[1][:103] + ask.tokens(8)],
    ]


@setup(
    "llama-loads-twice",
    "llama",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "max_num_batched_tokens": 108,
        "num_gpu_blocks_override": 36,
        "max_num_seqs": 2,
    },
)
def _llama_loads_twice(ask: Asked) -> Batches:
    """Prompts that go on for blocks behind what is loaded."""
    longer = [ask.shared + ask.tokens(5), ask.tokens(67)]
    return [longer, [longer[0][:64] + ask.tokens(75), ask.tokens(33), longer[1] + ask.tokens(58)]]


@setup("qwen-oldest", "qwen", {"max_num_batched_tokens": 240, "num_gpu_blocks_override": 9, "max_num_seqs": 1})
def _qwen_oldest(ask: Asked) -> Batches:
    """Prompts: one that comes again, for longer, when its blocks are the next to go."""
    first = ask.shared + ask.tokens(21)
    return [[first, ask.tokens(66), ask.tokens(71)], [first[:64] + ask.tokens(140), ask.tokens(18)], [ask.tokens(75)]]


@setup(
    "hybrid-loads-stages",
    "hybrid",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 90,
        "num_gpu_blocks_override": 70,
        "max_num_seqs": 3,
    },
)
def _hybrid_loads_stages(ask: Asked) -> Batches:
    """Prompts of two blocks and three, that are asked again with another end."""
    longer = [ask.shared + ask.tokens(24), ask.tokens(77), ask.tokens(40)]
    return [longer, [longer[1] + ask.tokens(12), ask.shared + ask.tokens(31)], [longer[2] + ask.tokens(5)]]


@setup(
    "llama-eagle-loads",
    "llama",
    {
        **EAGLE,
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "max_num_batched_tokens": 124,
        "num_gpu_blocks_override": 38,
        "max_num_seqs": 3,
    },
)
def _llama_eagle_loads(ask: Asked) -> Batches:
    """Prompts that go on behind what is loaded, with drafts behind them."""
    longer = [ask.shared + ask.tokens(13), ask.tokens(101)]
    return [longer, [longer[1][:98] + ask.tokens(20), ask.tokens(26)], [longer[0] + ask.tokens(9)]]


@setup(
    "delta-hits",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 80, "num_gpu_blocks_override": 30, "max_num_seqs": 3},
)
def _delta_hits(ask: Asked) -> Batches:
    """Prompts that begin with what has been asked before."""
    return [
        [ask.shared + ask.tokens(11), ask.tokens(58), ask.tokens(33)],
        [ask.shared + ask.tokens(29), ask.tokens(44)],
        [ask.shared[:66] + ask.tokens(15), ask.tokens(21)],
    ]


@setup("llama-strides", "llama", {"block_size": 64, "max_num_batched_tokens": 92, "num_gpu_blocks_override": 18})
def _llama_strides(ask: Asked) -> Batches:
    """Prompts of less than a block and of more."""
    return [
        [ask.tokens(23), ask.tokens(49), ask.tokens(88)],
        [ask.shared + ask.tokens(7), ask.tokens(36), ask.tokens(61)],
    ]


@setup("sliding-offsets", "sliding", {"max_num_batched_tokens": 50, "num_gpu_blocks_override": 40, "max_num_seqs": 3})
def _sliding_offsets(ask: Asked) -> Batches:
    """Prompts of one chunk and of more, and such that go on behind a prefix."""
    return [
        [ask.tokens(28), ask.tokens(36), ask.shared + ask.tokens(34)],
        [ask.shared + ask.tokens(22), ask.tokens(17), ask.shared[:50] + ask.tokens(9)],
    ]


@setup(
    "llama-streaming-turns",
    "llama",
    {"max_num_batched_tokens": 66, "num_gpu_blocks_override": 54, "max_num_seqs": 7},
)
def _llama_streaming_turns(ask: Asked) -> Batches:
    """Prompts that further input follows behind an answer, and others that go on behind the same answers."""
    return [
        [ask.tokens(21), ask.shared[:38], ask.tokens(29)],
        [ask.tokens(12), ask.tokens(19), ask.tokens(7)],
        [ask.tokens(33), ask.shared[:38] + ask.tokens(6)],
    ]


@setup(
    "delta-together",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 400, "num_gpu_blocks_override": 40, "max_num_seqs": 4},
)
def _delta_together(ask: Asked) -> Batches:
    """Prompts that begin alike and come at the same time."""
    first = ask.tokens(140)
    return [
        [ask.tokens(48), ask.tokens(31)],
        [first + ask.tokens(9), first + ask.tokens(14), ask.tokens(26)],
        [first + ask.tokens(5), ask.tokens(37)],
    ]


@setup(
    "sliding-loads-heads",
    "sliding",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "both", "most_blocks": 2}},
        "block_size": 16,
        "max_num_batched_tokens": 70,
        "num_gpu_blocks_override": 48,
        "max_num_seqs": 3,
    },
)
def _sliding_loads_heads(ask: Asked) -> Batches:
    """Prompts that are asked again with other ends, of which two blocks at a time are loaded."""
    longer = [ask.shared[:45] + ask.tokens(12), ask.tokens(39), ask.tokens(62)]
    return [
        longer,
        [longer[1] + ask.tokens(10), ask.shared[:45] + ask.tokens(20)],
        [ask.tokens(24), longer[2] + ask.tokens(8), longer[0] + ask.tokens(3)],
    ]


@setup(
    "qwen-clamps",
    "qwen",
    {"max_num_batched_tokens": 58, "num_gpu_blocks_override": 52, "max_num_seqs": 4},
)
def _qwen_clamps(ask: Asked) -> Batches:
    """Prompts that go on for long behind what they hit, while others use up most of a step."""
    return [
        [ask.shared + ask.tokens(5), ask.tokens(30), ask.tokens(17)],
        [ask.tokens(12), ask.shared + ask.tokens(66), ask.shared[:66] + ask.tokens(41), ask.tokens(40)],
    ]


@setup(
    "qwen-embeds-modes",
    "qwen",
    {
        "enable_prompt_embeds": True,
        "max_num_batched_tokens": 72,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 3,
    },
)
def _qwen_embeds_modes(ask: Asked) -> Batches:
    """Prompts of embeddings: the same ones, read in one way and in another."""
    longer = [ask.shared[:66] + ask.tokens(8), ask.tokens(41), ask.tokens(23)]
    return [
        longer,
        [longer[0] + ask.tokens(9), ask.tokens(28), longer[1]],
        [ask.shared[:66] + ask.tokens(17), longer[2] + ask.tokens(14)],
    ]


@setup(
    "llama-lora-cold",
    "llama",
    {
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "max_lora_rank": 8,
        "max_num_batched_tokens": 78,
        "num_gpu_blocks_override": 44,
        "max_num_seqs": 3,
    },
)
def _llama_lora_cold(ask: Asked) -> Batches:
    """Prompts of three tenants, of whom two have room: who has gone comes again, with new questions and with old ones."""
    return [
        [ask.shared + ask.tokens(7), ask.tokens(43)],
        [ask.tokens(52), ask.shared[:40] + ask.tokens(11)],
        [ask.tokens(38), ask.shared + ask.tokens(16), ask.tokens(24)],
    ]


@setup(
    "qwen-loads-stops",
    "qwen",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async", "fail_every": 2}},
        "max_num_batched_tokens": 86,
        "num_gpu_blocks_override": 38,
        "max_num_seqs": 3,
    },
)
def _qwen_loads_stops(ask: Asked) -> Batches:
    """Prompts that come again: of every other one a part does not come with the rest."""
    longer = [ask.shared + ask.tokens(19), ask.tokens(73), ask.tokens(35)]
    return [
        longer,
        [longer[0] + ask.tokens(8), longer[1][:66] + ask.tokens(17), ask.tokens(29)],
        [longer[1] + ask.tokens(6), longer[2] + ask.tokens(12)],
    ]


@setup(
    "llama-yarn",
    "llama",
    {
        "hf_overrides": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "max_num_batched_tokens": 94,
        "num_gpu_blocks_override": 42,
        "max_num_seqs": 3,
    },
)
def _llama_yarn(ask: Asked) -> Batches:
    """Prompts of up to two thirds of the longest context."""
    return [
        [ask.shared + ask.tokens(47), ask.tokens(34), ask.tokens(122)],
        [ask.tokens(158), ask.shared + ask.tokens(18), ask.shared + ask.tokens(71)],
    ]


@setup(
    "qwen-narrow",
    "qwen",
    {"kv_cache_dtype": "fp8_e4m3", "max_num_batched_tokens": 64, "num_gpu_blocks_override": 38, "max_num_seqs": 3},
)
def _qwen_narrow(ask: Asked) -> Batches:
    """Prompts of one block and of several, kept in eight bits."""
    return [
        [ask.shared + ask.tokens(12), ask.tokens(29), ask.tokens(51)],
        [ask.shared[:66] + ask.tokens(22), ask.tokens(37)],
    ]


@setup(
    "delta-handed",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 96, "num_gpu_blocks_override": 36, "max_num_seqs": 2},
)
def _delta_handed(ask: Asked) -> Batches:
    """Prompts of whole blocks and a token or a few, whose beginnings are there."""
    longer = [ask.shared[:64], ask.tokens(96)]
    return [longer, [longer[0] + ask.tokens(3), ask.tokens(39), longer[1] + ask.tokens(1)]]


@setup(
    "llama-loads-overlaps",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 160,
        "num_gpu_blocks_override": 30,
        "max_num_seqs": 1,
    },
)
def _llama_loads_overlaps(ask: Asked) -> Batches:
    """Prompts one after another, that are longer behind a beginning of one block or two, and come again."""
    longer = [ask.shared + ask.tokens(66), ask.tokens(74)]
    return [
        longer,
        [ask.shared[:44], longer[0] + ask.tokens(53), longer[1][:70] + ask.tokens(40)],
        [longer[1][:37], longer[1] + ask.tokens(34)],
    ]


@setup("qwen-columns", "qwen", {"max_num_batched_tokens": 104, "num_gpu_blocks_override": 40, "max_num_seqs": 3})
def _qwen_columns(ask: Asked) -> Batches:
    """Prompts of one block to three that have nothing in common, and two that begin alike."""
    return [
        [ask.tokens(77), ask.shared + ask.tokens(6), ask.tokens(42)],
        [ask.tokens(25), ask.shared + ask.tokens(27), ask.shared[:66] + ask.tokens(13), ask.tokens(54)],
    ]


@setup(
    "delta-turns",
    "qwen3_next",
    {
        "dtype": "bfloat16",
        "prefix_cache_retention_interval": 32,  # the states of answers are kept, too
        "max_num_batched_tokens": 180,
        "num_gpu_blocks_override": 44,
        "max_num_seqs": 2,
    },
    more=44,
)
def _delta_turns(ask: Asked) -> Batches:
    """Prompts that go on behind a part of the answers before, or behind all of them."""
    return [
        [ask.tokens(41), ask.shared[:52]],
        [ask.tokens(14), ask.tokens(23)],
        [ask.tokens(37), ask.shared[:52] + ask.tokens(8)],
    ]


@setup(
    "qwen-loads-kernels",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "block_size": 64,
        "max_num_batched_tokens": 148,
        "num_gpu_blocks_override": 22,
        "max_num_seqs": 3,
    },
)
def _qwen_loads_kernels(ask: Asked) -> Batches:
    """Prompts of one block or two that are asked again for longer, beside others."""
    longer = [ask.shared + ask.tokens(9), ask.tokens(136), ask.tokens(31)]
    return [
        longer,
        [ask.tokens(82), longer[1] + ask.tokens(12), longer[0] + ask.tokens(7)],
        [longer[0][:64] + ask.tokens(49), ask.tokens(35)],
    ]


@setup(
    "llama-eagle-steps",
    "llama",
    {**EAGLE, "max_num_batched_tokens": 88, "num_gpu_blocks_override": 40, "max_num_seqs": 3},
)
def _llama_eagle_steps(ask: Asked) -> Batches:
    """Prompts of some blocks, with drafts behind them."""
    return [[ask.shared + ask.tokens(8), ask.tokens(33), ask.tokens(59)], [ask.shared + ask.tokens(21), ask.tokens(47)]]


@setup(
    "qwen-loads-slow",
    "qwen",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "max_num_batched_tokens": 76,
        "num_gpu_blocks_override": 36,
        "max_num_seqs": 3,
    },
)
def _qwen_loads_slow(ask: Asked) -> Batches:
    """Prompts that come again while others take several steps to be computed."""
    longer = [ask.shared + ask.tokens(6), ask.tokens(67)]
    return [
        longer,
        [longer[0] + ask.tokens(9), ask.tokens(150), ask.tokens(20)],
        [longer[1] + ask.tokens(18), ask.tokens(141)],
    ]


@setup("hybrid-graphs", "hybrid", {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 72, "max_num_seqs": 4})
def _hybrid_graphs(ask: Asked) -> Batches:
    """Prompts that are answered four at a time, and then three."""
    return [
        [ask.tokens(28), ask.shared + ask.tokens(4), ask.tokens(39), ask.tokens(51)],
        [ask.shared[:60], ask.tokens(33), ask.shared + ask.tokens(15), ask.tokens(22), ask.tokens(46)],
    ]


@setup("hybrid-rings", "hybrid", {"max_num_batched_tokens": 152, "num_gpu_blocks_override": 76, "max_num_seqs": 2})
def _hybrid_rings(ask: Asked) -> Batches:
    """Prompts of chunks that are much longer than the window, and of some that are shorter."""
    return [
        [ask.tokens(118), ask.shared + ask.tokens(61), ask.tokens(35)],
        [ask.shared + ask.tokens(17), ask.tokens(143)],
    ]


@setup("qwen-pushes", "qwen", {"max_num_batched_tokens": 44, "num_gpu_blocks_override": 44, "max_num_seqs": 3})
def _qwen_pushes(ask: Asked) -> Batches:
    """Prompts of one chunk and of up to four."""
    return [
        [ask.shared + ask.tokens(41), ask.tokens(22), ask.tokens(131)],
        [ask.tokens(37), ask.shared + ask.tokens(58), ask.shared[:66] + ask.tokens(14)],
    ]


@setup(
    "qwen-halves",
    "qwen",
    {"dtype": "bfloat16", "max_num_batched_tokens": 70, "num_gpu_blocks_override": 42, "max_num_seqs": 3},
)
def _qwen_halves(ask: Asked) -> Batches:
    """Prompts of one block and of several, in numbers of sixteen bits."""
    return [
        [ask.shared + ask.tokens(9), ask.tokens(24), ask.tokens(57)],
        [ask.shared[:66] + ask.tokens(18), ask.tokens(45)],
    ]


@setup(
    "llama-loads-holes",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 200,
        "num_gpu_blocks_override": 40,
        "max_num_seqs": 2,
    },
)
def _llama_loads_holes(ask: Asked) -> Batches:
    """Prompts that go on behind the same two blocks, and come again when others have been kept in between."""
    longer = ask.shared[:64] + ask.tokens(79)
    return [
        [ask.shared[:64] + ask.tokens(66)],
        [ask.tokens(97), ask.tokens(98)],
        [longer],
        [longer + ask.tokens(14), ask.tokens(30)],
    ]


@setup(
    "qwen-loads-memories",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 120,
        "num_gpu_blocks_override": 34,
        "max_num_seqs": 3,
    },
)
def _qwen_loads_memories(ask: Asked) -> Batches:
    """Prompts that are asked alone, and then behind one another."""
    texts = [ask.shared[:64], ask.tokens(64), ask.tokens(32)]
    return [
        [text + ask.tokens(5) for text in texts],
        [texts[0] + texts[1] + ask.tokens(12), ask.tokens(28)],
        [texts[2] + texts[0] + ask.tokens(7), texts[1] + ask.tokens(16)],
    ]


@setup("qwen-budgets", "qwen", {"max_num_batched_tokens": 98, "num_gpu_blocks_override": 46, "max_num_seqs": 3})
def _qwen_budgets(ask: Asked) -> Batches:
    """Prompts that go on behind all of the answers before."""
    return [
        [ask.tokens(57), ask.shared[:43], ask.tokens(25)],
        [ask.tokens(18), ask.tokens(11), ask.tokens(29)],
    ]


@setup("llama-wraps", "llama", {"max_num_batched_tokens": 82, "num_gpu_blocks_override": 40, "max_num_seqs": 3})
def _llama_wraps(ask: Asked) -> Batches:
    """Prompts of one block to four, of which some begin alike."""
    return [
        [ask.shared + ask.tokens(10), ask.tokens(56), ask.tokens(27)],
        [ask.tokens(103), ask.shared + ask.tokens(23), ask.shared[:66] + ask.tokens(7)],
    ]


@setup(
    "hybrid-loads-late-stores",
    "hybrid",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 26,
        "max_num_seqs": 2,
    },
)
def _hybrid_loads_late_stores(ask: Asked) -> Batches:
    """Prompts of several windows, of which a beginning comes again with another end."""
    longer = [ask.tokens(159), ask.shared + ask.tokens(62)]
    return [longer, [longer[0][:36] + ask.tokens(31), longer[1][:101] + ask.tokens(15), longer[1][:43] + ask.tokens(8)]]


@setup("hybrid-decodes", "hybrid", {"max_num_batched_tokens": 136, "num_gpu_blocks_override": 84, "max_num_seqs": 3})
def _hybrid_decodes(ask: Asked) -> Batches:
    """Prompts that are longer than the window, and such that become so while they are answered."""
    return [
        [ask.tokens(63), ask.tokens(37), ask.tokens(92)],
        [ask.tokens(45), ask.shared + ask.tokens(6)],
    ]


@setup(
    "delta-returns",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 128, "num_gpu_blocks_override": 15, "max_num_seqs": 3},
    more=38,
)
def _delta_returns(ask: Asked) -> Batches:
    """Prompts that grow until there is no room for all of them."""
    return [[ask.tokens(51), ask.tokens(34), ask.tokens(60)], [ask.tokens(28), ask.shared[:57]]]


@setup(
    "llama-loads-tails",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 112,
        "num_gpu_blocks_override": 32,
        "max_num_seqs": 2,
    },
)
def _llama_loads_tails(ask: Asked) -> Batches:
    """Prompts that go on for two blocks behind the same beginning, and come again with other ends."""
    longer = [ask.shared[:64] + ask.tokens(75), ask.tokens(103), ask.shared[:64] + ask.tokens(41)]
    return [
        [ask.shared + ask.tokens(3), *longer],
        [ask.tokens(47), longer[0] + ask.tokens(11), longer[1] + ask.tokens(6)],
        [longer[2] + ask.tokens(19), ask.tokens(24)],
    ]


@setup(
    "qwen-loads-fresh",
    "qwen",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "max_num_batched_tokens": 100,
        "num_gpu_blocks_override": 34,
        "max_num_seqs": 3,
    },
)
def _qwen_loads_fresh(ask: Asked) -> Batches:
    """Prompts that come again beside others that nobody has asked."""
    longer = [ask.shared + ask.tokens(30), ask.tokens(69)]
    return [
        [*longer, ask.tokens(22)],
        [ask.tokens(55), longer[1] + ask.tokens(13)],
        [longer[0] + ask.tokens(5), ask.tokens(40), longer[1][:65] + ask.tokens(10)],
    ]


@setup(
    "delta-waits",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 140, "num_gpu_blocks_override": 15, "max_num_seqs": 4},
)
def _delta_waits(ask: Asked) -> Batches:
    """Prompts that begin like one before them, more than there is room for at a time."""
    return [
        [ask.shared + ask.tokens(12), ask.tokens(36)],
        [ask.shared + ask.tokens(25), ask.tokens(49), ask.shared[:66] + ask.tokens(14), ask.shared + ask.tokens(38)],
        [ask.tokens(42), ask.shared[:67] + ask.tokens(20)],
    ]


@setup("qwen-rows", "qwen", {"max_num_batched_tokens": 116, "num_gpu_blocks_override": 44, "max_num_seqs": 3})
def _qwen_rows(ask: Asked) -> Batches:
    """Prompts that are computed two at a time, and answered three at a time."""
    return [
        [ask.tokens(43), ask.shared + ask.tokens(2), ask.tokens(27)],
        [ask.shared + ask.tokens(14), ask.tokens(53), ask.tokens(30)],
    ]


@setup("qwen-uploads", "qwen", {"max_num_batched_tokens": 52, "num_gpu_blocks_override": 22, "max_num_seqs": 3})
def _qwen_uploads(ask: Asked) -> Batches:
    """Prompts of up to four chunks, and of one, in blocks that others have had before."""
    return [
        [ask.tokens(157), ask.shared + ask.tokens(9), ask.tokens(31)],
        [ask.tokens(140), ask.tokens(118), ask.tokens(26)],
        [ask.shared + ask.tokens(77), ask.tokens(129)],
    ]


@setup(
    "sliding-eagle-hits",
    "sliding",
    {**EAGLE, "block_size": 64, "max_num_batched_tokens": 172, "num_gpu_blocks_override": 44, "max_num_seqs": 3},
)
def _sliding_eagle_hits(ask: Asked) -> Batches:
    """Prompts of two blocks, each longer than a window, with drafts behind them, that are asked again with other ends."""
    longer = [ask.shared + ask.tokens(76), ask.tokens(139), ask.tokens(29)]
    return [
        longer,
        [longer[0][:133] + ask.tokens(18), ask.tokens(47), longer[1] + ask.tokens(10)],
        [longer[0] + ask.tokens(21), longer[1][:130] + ask.tokens(12)],
    ]


@setup(
    "hybrid-interleaved",
    "hybrid",
    {
        "long_prefill_token_threshold": 64,
        "max_num_batched_tokens": 164,
        "num_gpu_blocks_override": 88,
        "max_num_seqs": 3,
    },
)
def _hybrid_interleaved(ask: Asked) -> Batches:
    """Prompts that are computed side by side, each in chunks of two blocks, and a short one."""
    return [
        [ask.tokens(206), ask.shared + ask.tokens(102), ask.tokens(30)],
        [ask.tokens(151), ask.tokens(194)],
    ]


@setup(
    "hybrid-bursts",
    "hybrid",
    {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 90, "max_num_seqs": 2},
)
def _hybrid_bursts(ask: Asked) -> Batches:
    """Prompts of several chunks, each of which is twice as long as the window, and short ones."""
    return [
        [ask.tokens(214), ask.tokens(27)],
        [ask.shared + ask.tokens(125), ask.tokens(41)],
        [ask.shared + ask.tokens(15), ask.tokens(178)],
    ]


@setup(
    "qwen-ngram-tails",
    "qwen",
    {
        **NGRAM,
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 108,
        "num_gpu_blocks_override": 32,
        "max_num_seqs": 3,
    },
)
def _qwen_ngram_tails(ask: Asked) -> Batches:
    """Prompts that another engine has computed but for their last token, and others beside them."""
    longer = [ask.shared[:65], ask.tokens(8) * 5, ask.tokens(97)]
    return [longer, [longer[2], longer[0]], [longer[0][:33], ask.tokens(5) * 9, longer[2][:65]]]


@setup(
    "qwen-loads-leaves",
    "qwen",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "max_num_batched_tokens": 180,
        "num_gpu_blocks_override": 12,
        "max_num_seqs": 4,
    },
)
def _qwen_loads_leaves(ask: Asked) -> Batches:
    """Prompts: one that waits for what it loads and is left, and one that waits for room behind two that run."""
    first = ask.shared + ask.tokens(13)
    return [
        [first, ask.tokens(29), ask.tokens(45)],
        [first + ask.tokens(3), ask.tokens(118), ask.tokens(50), ask.tokens(151)],
        [ask.tokens(38), first[:66] + ask.tokens(9)],
    ]


@setup("llama-recycles", "llama", {"max_num_batched_tokens": 152, "num_gpu_blocks_override": 31, "max_num_seqs": 3})
def _llama_recycles(ask: Asked) -> Batches:
    """Prompts: the first is answered for long, while others come and go beside it."""
    return [
        [ask.tokens(35), ask.tokens(57), ask.shared + ask.tokens(10), ask.tokens(44), ask.tokens(92), ask.tokens(28)],
        [ask.shared + ask.tokens(19), ask.tokens(63)],
    ]


@setup("mrope-interleaved", "mrope", {"max_num_batched_tokens": 60, "num_gpu_blocks_override": 37, "max_num_seqs": 3})
def _mrope_interleaved(ask: Asked) -> Batches:
    """Prompts of several chunks beside one that is answered already."""
    return [
        [ask.tokens(26), ask.tokens(130), ask.shared + ask.tokens(39)],
        [ask.tokens(31), ask.shared + ask.tokens(88)],
    ]


@setup(
    "delta-continues",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 64, "num_gpu_blocks_override": 33, "max_num_seqs": 3},
)
def _delta_continues(ask: Asked) -> Batches:
    """Prompts of several chunks, and such that go on behind what has been asked before."""
    return [
        [ask.tokens(110), ask.tokens(30)],
        [ask.shared + ask.tokens(65), ask.tokens(18)],
        [ask.shared[:66] + ask.tokens(27), ask.tokens(77)],
    ]


@setup(
    "llama-eagle-names",
    "llama",
    {**EAGLE, "block_size": 64, "max_num_batched_tokens": 144, "num_gpu_blocks_override": 30, "max_num_seqs": 3},
)
def _llama_eagle_names(ask: Asked) -> Batches:
    """Prompts of one chunk and of two, with drafts behind them."""
    return [[ask.tokens(34), ask.tokens(159), ask.shared], [ask.shared + ask.tokens(68), ask.tokens(47)]]


@setup("hybrid-alone", "hybrid", {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 58, "max_num_seqs": 1})
def _hybrid_alone(ask: Asked) -> Batches:
    """Prompts of several chunks, one after another, and such that go on behind what has been asked before."""
    return [[ask.tokens(140), ask.shared + ask.tokens(20)], [ask.shared + ask.tokens(107), ask.tokens(39)]]


@setup(
    "llama-lora-shares",
    "llama",
    {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "kv_transfer_config": LOADS,
        "block_size": 64,
        "max_num_batched_tokens": 140,
        "num_gpu_blocks_override": 23,
        "max_num_seqs": 3,
    },
)
def _llama_lora_shares(ask: Asked) -> Batches:
    """Prompts of one tenant, some of which another one asks, too, and then the first once more."""
    longer = [ask.shared + ask.tokens(9), ask.tokens(131)]
    return [
        longer,
        [ask.tokens(75), longer[1] + ask.tokens(5), ask.shared[:67] + ask.tokens(12)],
        [longer[0] + ask.tokens(60), ask.tokens(22)],
    ]


@setup(
    "delta-resets",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 104, "num_gpu_blocks_override": 24, "max_num_seqs": 1},
)
def _delta_resets(ask: Asked) -> Batches:
    """Prompts that have nothing in common, one after another."""
    return [[ask.tokens(45), ask.tokens(71)], [ask.tokens(28), ask.tokens(115)]]


@setup("qwen-suspends", "qwen", {"max_num_batched_tokens": 156, "num_gpu_blocks_override": 27, "max_num_seqs": 3})
def _qwen_suspends(ask: Asked) -> Batches:
    """Prompts that have nothing in common; the first one is soon done, and behind that all are put back once."""
    return [
        [ask.tokens(41), ask.tokens(75), ask.tokens(52), ask.tokens(60)],
        [ask.tokens(88), ask.tokens(34)],
    ]


@setup("llama-cohorts", "llama", {"max_num_batched_tokens": 240, "num_gpu_blocks_override": 35, "max_num_seqs": 4})
def _llama_cohorts(ask: Asked) -> Batches:
    """Prompts that are answered together, and the longer one is the sooner it is done."""
    return [
        [ask.tokens(78), ask.tokens(66), ask.tokens(59), ask.tokens(37)],
        [ask.tokens(97), ask.shared, ask.tokens(49)],
    ]


@setup(
    "llama-eagle-warm",
    "llama",
    {**EAGLE, "max_num_batched_tokens": 116, "num_gpu_blocks_override": 38, "max_num_seqs": 3},
)
def _llama_eagle_warm(ask: Asked) -> Batches:
    """Prompts of one block to four, with drafts behind them."""
    return [[ask.tokens(29), ask.tokens(87), ask.shared], [ask.shared[:64] + ask.tokens(50), ask.tokens(43)]]


@setup(
    "llama-loads-replicas",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 132,
        "num_gpu_blocks_override": 29,
        "max_num_seqs": 2,
    },
)
def _llama_loads_replicas(ask: Asked) -> Batches:
    """Prompts that come again, some of them longer, when their blocks have been given to others."""
    first = [ask.shared + ask.tokens(11), ask.tokens(100), ask.tokens(45)]
    return [first, [ask.tokens(53), first[1] + ask.tokens(9)], [first[0] + ask.tokens(26), first[2][:33]]]


@setup(
    "hybrid-frontiers",
    "hybrid",
    {
        "long_prefill_token_threshold": 64,
        "max_num_batched_tokens": 132,
        "num_gpu_blocks_override": 34,
        "max_num_seqs": 3,
    },
    more=24,
)
def _hybrid_frontiers(ask: Asked) -> Batches:
    """Prompts of up to four chunks, each of two blocks, with little room."""
    return [
        [ask.tokens(198), ask.tokens(135), ask.tokens(26)],
        [ask.tokens(170), ask.tokens(101), ask.tokens(143)],
    ]


@setup("llama-recomputes", "llama", {"max_num_batched_tokens": 54, "num_gpu_blocks_override": 33, "max_num_seqs": 3})
def _llama_recomputes(ask: Asked) -> Batches:
    """Prompts: a short one, and a long one that is under way in chunks when all are put back."""
    return [
        [ask.tokens(62), ask.shared + ask.tokens(5)],
        [ask.tokens(32), ask.tokens(165), ask.tokens(44)],
    ]


@setup(
    "llama-eagle-slots",
    "llama",
    {**EAGLE, "max_num_batched_tokens": 148, "num_gpu_blocks_override": 47, "max_num_seqs": 4},
)
def _llama_eagle_slots(ask: Asked) -> Batches:
    """Prompts of one block to four that are answered together, with drafts behind them."""
    return [
        [ask.tokens(88), ask.tokens(40), ask.shared, ask.tokens(25)],
        [ask.shared[:66] + ask.tokens(31), ask.tokens(54)],
    ]


@setup("recurrent-snapshots", "lfm2", {"max_num_batched_tokens": 92, "num_gpu_blocks_override": 40, "max_num_seqs": 3})
def _recurrent_snapshots(ask: Asked) -> Batches:
    """Prompts whose beginning comes again with other ends, when they have been answered."""
    longer = [ask.shared + ask.tokens(15), ask.tokens(49)]
    return [
        longer,
        [ask.shared[:66] + ask.tokens(20), ask.tokens(33)],
        [longer[1][:33] + ask.tokens(24), ask.shared + ask.tokens(36)],
    ]


@setup("qwen-forks", "qwen", {"max_num_batched_tokens": 184, "num_gpu_blocks_override": 39, "max_num_seqs": 4})
def _qwen_forks(ask: Asked) -> Batches:
    """Prompts that are answered two or three times over, with other answers each time."""
    first, second = ask.tokens(44), ask.shared + ask.tokens(11)
    return [[first, first, ask.tokens(30)], [second, second, second, ask.tokens(51)]]


@setup(
    "hybrid-loads-flags",
    "hybrid",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 176,
        "num_gpu_blocks_override": 54,
        "max_num_seqs": 3,
    },
)
def _hybrid_loads_flags(ask: Asked) -> Batches:
    """Prompts of two blocks and more that come again one after another, with other ends."""
    longer = [ask.shared + ask.tokens(27), ask.tokens(105), ask.tokens(42)]
    return [
        longer,
        [longer[0] + ask.tokens(8), ask.tokens(36)],
        [longer[1][:99] + ask.tokens(12), longer[2] + ask.tokens(17)],
    ]


@setup("llama-trash", "llama", {"max_num_batched_tokens": 72, "num_gpu_blocks_override": 16, "max_num_seqs": 3})
def _llama_trash(ask: Asked) -> Batches:
    """Prompts of two chunks and of one, in few blocks."""
    return [[ask.tokens(80), ask.tokens(39), ask.shared], [ask.shared + ask.tokens(9), ask.tokens(48)]]


@setup("sliding-budgets", "sliding", {"max_num_batched_tokens": 60, "num_gpu_blocks_override": 42, "max_num_seqs": 3})
def _sliding_budgets(ask: Asked) -> Batches:
    """Prompts of one chunk to three, and such that grow long while they are answered."""
    return [[ask.tokens(52), ask.tokens(130), ask.tokens(21)], [ask.shared + ask.tokens(40), ask.tokens(58)]]


@setup(
    "delta-idles",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 86, "num_gpu_blocks_override": 37, "max_num_seqs": 3},
)
def _delta_idles(ask: Asked) -> Batches:
    """Prompts whose beginnings come again with other ends when nobody has asked for a while, two times over."""
    longer = [ask.tokens(98), ask.shared + ask.tokens(7), ask.tokens(45)]
    return [
        longer,
        [longer[0][:50] + ask.tokens(13), ask.shared[:47] + ask.tokens(21), longer[2][:39] + ask.tokens(6)],
        [longer[1][:36] + ask.tokens(30), longer[0][:41] + ask.tokens(24)],
    ]


@setup(
    "llama-eagle-mixed",
    "llama",
    {**EAGLE, "block_size": 64, "max_num_batched_tokens": 78, "num_gpu_blocks_override": 26, "max_num_seqs": 3},
)
def _llama_eagle_mixed(ask: Asked) -> Batches:
    """Prompts of several chunks beside others that are answered already, with drafts behind them, and one that comes again."""
    longer = [ask.tokens(31), ask.tokens(163), ask.shared + ask.tokens(20)]
    return [longer, [ask.tokens(24), longer[1][:140] + ask.tokens(50), ask.tokens(58)]]


@setup(
    "qwen-loads-names",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 232,
        "num_gpu_blocks_override": 27,
        "max_num_seqs": 2,
    },
)
def _qwen_loads_names(ask: Asked) -> Batches:
    """Prompts of which one comes again, more of it each time, when its beginning is there already."""
    first = ask.tokens(205)
    return [
        [first, ask.tokens(60)],
        [first[:70], ask.tokens(35), first[:140] + ask.tokens(12)],
        [first[:44] + ask.tokens(9), ask.tokens(71), first[:180]],
    ]


@setup(
    "sliding-guesses",
    "sliding",
    {
        "speculative_config": {**NGRAM["speculative_config"], "num_speculative_tokens": 4},
        "max_num_batched_tokens": 110,
        "num_gpu_blocks_override": 36,
        "max_num_seqs": 3,
    },
    more=26,
)
def _sliding_guesses(ask: Asked) -> Batches:
    """Prompts that repeat themselves, longer than a window, so that there is much to guess and little of it right."""
    first, second = ask.tokens(7) * 9, ask.tokens(90)
    return [
        [first, second, ask.tokens(11) * 3],
        [second + ask.tokens(14), first[:56] + ask.tokens(9)],
    ]


@setup("qwen-histories", "qwen", {"max_num_batched_tokens": 114, "num_gpu_blocks_override": 14, "max_num_seqs": 3})
def _qwen_histories(ask: Asked) -> Batches:
    """Prompts that go on behind what has been asked before, in blocks that others have had before."""
    longer = [ask.shared + ask.tokens(14), ask.tokens(51), ask.tokens(83)]
    return [
        longer,
        [ask.shared[:67] + ask.tokens(22), ask.tokens(37), longer[2][:66] + ask.tokens(10)],
        [longer[0][:70] + ask.tokens(29), ask.tokens(46)],
    ]


@setup("recurrent-refits", "lfm2", {"max_num_batched_tokens": 106, "num_gpu_blocks_override": 43, "max_num_seqs": 3})
def _recurrent_refits(ask: Asked) -> Batches:
    """Prompts that come again, with other ends, each time that the weights are new."""
    longer = [ask.shared + ask.tokens(18), ask.tokens(68), ask.tokens(41)]
    return [
        longer,
        [longer[1][:65] + ask.tokens(11), ask.tokens(30), ask.shared[:66] + ask.tokens(9)],
        [longer[0][:67] + ask.tokens(26), ask.tokens(52), longer[2][:34] + ask.tokens(15)],
    ]


@setup(
    "llama-eagle-reserves",
    "llama",
    {
        "speculative_config": {**EAGLE["speculative_config"], "num_speculative_tokens": 4},
        "max_num_batched_tokens": 126,
        "num_gpu_blocks_override": 41,
        "max_num_seqs": 3,
    },
    more=14,
)
def _llama_eagle_reserves(ask: Asked) -> Batches:
    """Prompts of three blocks and more, and then shorter ones in their rows, some of which begin as they do."""
    longer = [ask.shared + ask.tokens(41), ask.tokens(119), ask.tokens(97)]
    return [
        longer,
        [ask.tokens(31), ask.shared[:66] + ask.tokens(29), ask.tokens(63)],
        [longer[1][:97] + ask.tokens(8), longer[0] + ask.tokens(10), longer[2][:65] + ask.tokens(20)],
    ]


@setup(
    "qwen-loads-appends",
    "qwen",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 168,
        "num_gpu_blocks_override": 33,
        "max_num_seqs": 2,
    },
)
def _qwen_loads_appends(ask: Asked) -> Batches:
    """Prompts of whole blocks and one token, that come when their first block or two are there and the others are kept."""
    first, second = ask.tokens(161), ask.shared + ask.tokens(66)
    return [
        [first, second, ask.tokens(50)],
        [first[:37], ask.tokens(20), first[:129], second[:75]],
        [second[:69], ask.tokens(43), second[:129], first[:97] + ask.tokens(15)],
    ]


@setup("sliding-ragged", "sliding", {"max_num_batched_tokens": 118, "num_gpu_blocks_override": 46, "max_num_seqs": 3})
def _sliding_ragged(ask: Asked) -> Batches:
    """Prompts of a chunk that is shorter than the window, of one that is longer, and of two."""
    return [
        [ask.tokens(34), ask.tokens(71), ask.shared + ask.tokens(76)],
        [ask.shared + ask.tokens(23), ask.tokens(102), ask.shared[:66] + ask.tokens(30)],
    ]


@setup(
    "delta-mixes",
    "qwen3_next",
    {
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",  # in the same memory as keys and values of sixteen bits
        "max_num_batched_tokens": 150,
        "num_gpu_blocks_override": 34,
        "max_num_seqs": 3,
    },
)
def _delta_mixes(ask: Asked) -> Batches:
    """Prompts whose blocks go around between layers that keep states and others, some of which come again with other ends."""
    longer = [ask.shared + ask.tokens(84), ask.tokens(137), ask.tokens(52)]
    return [
        longer,
        [longer[0][:140] + ask.tokens(11), ask.tokens(66), longer[1] + ask.tokens(9)],
        [ask.tokens(31), longer[0] + ask.tokens(18), ask.tokens(90)],
    ]


@setup(
    "qwen-embeds-pictures",
    "qwen",
    {
        "enable_prompt_embeds": True,
        "max_num_batched_tokens": 94,
        "num_gpu_blocks_override": 57,
        "max_num_seqs": 4,
    },
)
def _qwen_embeds_pictures(ask: Asked) -> Batches:
    """Prompts of a text, a picture and a question: ten tokens of each picture, over and over, numbered from 600 on."""
    pictures = [[600 + 10 * one + part % 10 for part in range(36)] for one in range(3)]
    text = ask.shared[:40]
    return [
        [text + pictures[0] + ask.tokens(14), ask.tokens(45), text + ask.tokens(27)],
        [text + pictures[0] + ask.tokens(22), text + pictures[1] + ask.tokens(17), ask.tokens(33)],
        [text + pictures[2] + ask.tokens(9), text + pictures[1] + ask.tokens(25)],
    ]


@setup(
    "llama-loads-epochs",
    "llama",
    {
        "kv_transfer_config": LOADS,
        "max_num_batched_tokens": 190,
        "num_gpu_blocks_override": 12,
        "max_num_seqs": 3,
    },
    more=30,
)
def _llama_loads_epochs(ask: Asked) -> Batches:
    """Prompts that are of one length and grow together until there is no room for all, and then two at a time."""
    first = [ask.tokens(62), ask.tokens(62), ask.shared[:62]]
    return [first, [ask.tokens(20), first[2][:40] + ask.tokens(4)], [first[0][:36] + ask.tokens(9), ask.tokens(25)]]


@setup(
    "qwen-embeds-albums",
    "qwen",
    {
        "enable_prompt_embeds": True,
        "max_num_batched_tokens": 122,
        "num_gpu_blocks_override": 61,
        "max_num_seqs": 3,
    },
)
def _qwen_embeds_albums(ask: Asked) -> Batches:
    """Prompts of a text, a picture or two and a question: ten tokens of each picture, over and over, numbered from 600 on."""
    one, two, three, four = ([600 + 10 * number + part % 10 for part in range(64)] for number in range(4))
    text = ask.shared[:32]
    return [
        [text + one + two + ask.tokens(13), ask.tokens(37), text + three + ask.tokens(21)],
        [text + one + two + ask.tokens(24), text + three + two + ask.tokens(16), ask.tokens(29)],
        [text + three + four + ask.tokens(11), text + two + ask.tokens(18)],
    ]


@setup("recurrent-cancels", "lfm2", {"max_num_batched_tokens": 98, "num_gpu_blocks_override": 38, "max_num_seqs": 3})
def _recurrent_cancels(ask: Asked) -> Batches:
    """Prompts: one of whole blocks and a token that is left as soon as it is computed, and others that begin as it does."""
    return [
        [ask.shared[:65], ask.tokens(42), ask.tokens(27)],
        [ask.shared[:65] + ask.tokens(22), ask.tokens(58)],
        [ask.tokens(34), ask.shared[:64] + ask.tokens(39), ask.tokens(19)],
    ]


@setup(
    "llama-loads-binds",
    "llama",
    {
        "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
        "max_num_batched_tokens": 122,
        "num_gpu_blocks_override": 43,
        "max_num_seqs": 3,
    },
)
def _llama_loads_binds(ask: Asked) -> Batches:
    """Prompts that go on for some blocks behind what is loaded, and come again with all of that."""
    first = [ask.tokens(101), ask.shared, ask.tokens(23)]
    longer = [first[0][:98] + ask.tokens(70), first[1][:67] + ask.tokens(44)]
    return [
        first,
        [*longer, ask.tokens(36)],
        [longer[1] + ask.tokens(9), ask.tokens(48), longer[0] + ask.tokens(14)],
    ]


@setup(
    "delta-cancels",
    "qwen3_next",
    {"dtype": "bfloat16", "max_num_batched_tokens": 70, "num_gpu_blocks_override": 42, "max_num_seqs": 3},
)
def _delta_cancels(ask: Asked) -> Batches:
    """Prompts: of the second batch, one of several chunks is left before its last, beside another and before others."""
    return [
        [ask.shared + ask.tokens(10), ask.tokens(32)],
        [ask.tokens(190), ask.shared[:66] + ask.tokens(25), ask.tokens(47), ask.tokens(20)],
        [ask.tokens(61), ask.shared + ask.tokens(17), ask.tokens(104)],
    ]


@setup(
    "llama-mirrors",
    "llama",
    {"max_num_batched_tokens": 134, "num_gpu_blocks_override": 13, "max_num_seqs": 3},
    more=36,
)
def _llama_mirrors(ask: Asked) -> Batches:
    """Prompts of two blocks and more that grow together until one is put back, and some that begin as they do."""
    first = [ask.tokens(90), ask.tokens(79), ask.shared + ask.tokens(21)]
    return [
        first,
        [first[2] + ask.tokens(7), ask.tokens(30), first[1][:66] + ask.tokens(12)],
        [ask.shared + ask.tokens(14), first[0][:65] + ask.tokens(24)],
    ]


@setup("mrope-extends", "mrope", {"max_num_batched_tokens": 88, "num_gpu_blocks_override": 41, "max_num_seqs": 3})
def _mrope_extends(ask: Asked) -> Batches:
    """Prompts that join others which are answered already, some of them shorter than those and some longer."""
    return [
        [ask.tokens(84), ask.tokens(35), ask.shared + ask.tokens(4), ask.tokens(22), ask.tokens(57)],
        [ask.shared + ask.tokens(31), ask.tokens(18), ask.shared[:66] + ask.tokens(8), ask.tokens(40)],
    ]
