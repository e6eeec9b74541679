"""Runs vLLM for the corpus: with one bug, or with none; every run is a process forked from one that has imported it all.

python vllm_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFORMANCE = HERE.parent / "conformance" / "vllm"
sys.path[:0] = [str(HERE), str(CONFORMANCE)]

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
# model, further arguments, most tokens of an answer
SETUPS = {
    "llama": ("llama", {}),
    "llama-churn": ("llama", {"max_num_seqs": 3}),
    "llama-few": ("llama", {"num_gpu_blocks_override": 12, "max_num_seqs": 3}),
    "llama-preempt": ("llama", FEW),
    "llama-twins": ("llama", {"num_gpu_blocks_override": 12, "max_num_seqs": 3}),
    "llama-aborts": ("llama", {"num_gpu_blocks_override": 11, "max_num_seqs": 3}),
    "llama-async": ("llama", {"async_scheduling": True}),
    "llama-async-preempt": ("llama", {"async_scheduling": True, **FEW}),
    "sliding": ("sliding", {}),
    "sliding-churn": ("sliding", {"max_num_seqs": 3}),
    "hybrid": ("hybrid", {}),
    "hybrid-preempt": ("hybrid", {"num_gpu_blocks_override": 22}),
    "llama-eagle": ("llama", {**EAGLE, "max_num_batched_tokens": 64}),
    "llama-eagle-parts": ("llama", {**EAGLE, "max_num_batched_tokens": 64}),
    "llama-loads": ("llama", {"kv_transfer_config": LOADS}),
    "llama-loads-parts": ("llama", {"kv_transfer_config": LOADS}),
    "llama-loads-two": ("llama", {"kv_transfer_config": LOADS}),
    "llama-loads-middle": ("llama", {"kv_transfer_config": LOADS}),
    "llama-loads-salts": ("llama", {"kv_transfer_config": LOADS}),
    "llama-loads-wide": ("llama", {"kv_transfer_config": LOADS, "max_num_batched_tokens": 128}),
    "hybrid-loads": ("hybrid", {"kv_transfer_config": LOADS}),
    "llama-loads-fails": (
        "llama",
        {"kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "sync", "fail_every": 1}}},
    ),
    "llama-loads-late": (
        "llama",
        {
            "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
            "num_gpu_blocks_override": 16,
            "max_num_seqs": 3,
        },
    ),
    "llama-loads-alone": (
        "llama",
        {"kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}}},
    ),
    "llama-loads-few": ("llama", {"kv_transfer_config": LOADS, "num_gpu_blocks_override": 14, "max_num_seqs": 3}),
    "llama-loads-back": ("llama", {"kv_transfer_config": LOADS, "num_gpu_blocks_override": 14, "max_num_seqs": 3}),
    "llama-weights-running": ("llama", {}),
    "llama-streaming": ("llama", {}),
    "llama-page64": ("llama", {"block_size": 64}),
    "llama-salts": ("llama", {}),
    "llama-embeds": ("llama", {"enable_prompt_embeds": True}),
    "llama-parts": ("llama", {"max_num_seqs": 3}),
    "recurrent": ("lfm2", {}),
    "recurrent-short": ("lfm2", {}),
    "recurrent-ones": ("lfm2", {}),
    "recurrent-little": ("lfm2", {}),
    "recurrent-together": ("lfm2", {}),
    "delta": ("qwen3_next", {"dtype": "bfloat16"}),
    "delta-units": ("qwen3_next", {"dtype": "bfloat16", "prefix_match_unit": 16}),
    "delta-preempt": ("qwen3_next", {"dtype": "bfloat16", "num_gpu_blocks_override": 18}),
    "llama-lora": ("llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    "llama-lora-mixed": ("llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    "llama-lora-salts": ("llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    "llama-lora-reload": ("llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    "llama-loads-weights": ("llama", {"kv_transfer_config": LOADS}),
    "hybrid-halves": ("hybrid", {}),
    "qwen-ngram": ("qwen", {**NGRAM, "block_size": 64}),
    "qwen-ngram-page32": ("qwen", NGRAM),
    "mla": ("mla", {"block_size": 16, "num_gpu_blocks_override": 128, "max_num_seqs": 4}),
    "llama-lora-loads": (
        "llama",
        {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "kv_transfer_config": LOADS, "max_num_seqs": 4},
    ),
    "llama-lora-added": (
        "llama",
        {
            "enable_lora": True,
            "max_loras": 2,
            "max_cpu_loras": 4,
            "max_lora_rank": 8,
            "max_num_batched_tokens": 96,
        },
    ),
    "mrope-chunks": ("mrope", {"max_num_batched_tokens": 24, "block_size": 64, "max_num_seqs": 4}),
    "llama-sleeps": ("llama", {"max_num_batched_tokens": 80, "block_size": 64}),
    "llama-loads-aborts": (
        "llama",
        {
            "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
            "num_gpu_blocks_override": 12,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 160,
        },
    ),
    "qwen-ngram-five": (
        "qwen",
        {
            "speculative_config": {**NGRAM["speculative_config"], "num_speculative_tokens": 5},
            "num_gpu_blocks_override": 16,
            "max_num_seqs": 3,
        },
    ),
    "delta-long": ("qwen3_next", {"dtype": "bfloat16", "max_num_batched_tokens": 80, "max_num_seqs": 4}),
    "llama-chunks-back": (
        "llama",
        {
            "num_gpu_blocks_override": 10,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 4,
        },
    ),
    "llama-eagle-brim": (
        "llama",
        {
            "speculative_config": {**EAGLE["speculative_config"], "num_speculative_tokens": 5},
            "max_num_batched_tokens": 160,
            "block_size": 64,
            "max_num_seqs": 4,
        },
    ),
    "llama-eagle-churn": ("llama", {**EAGLE, "max_num_batched_tokens": 96, "max_num_seqs": 3}),
    "hybrid-crowd": (
        "hybrid",
        {"max_num_batched_tokens": 200, "num_gpu_blocks_override": 48, "max_num_seqs": 5, "block_size": 16},
    ),
    "sliding-tight": (
        "sliding",
        {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 12, "max_num_seqs": 3, "block_size": 16},
    ),
    "llama-loads-turns": (
        "llama",
        {
            "kv_transfer_config": LOADS,
            "num_gpu_blocks_override": 9,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 2,
        },
    ),
    "llama-loads-rest": (
        "llama",
        {
            "kv_transfer_config": {**LOADS, "kv_connector_extra_config": {"when": "async"}},
            "num_gpu_blocks_override": 24,
            "max_num_batched_tokens": 72,
            "max_num_seqs": 1,
        },
    ),
    # A place for an adapter stays free: on the CPU requests without one get the last (docs/results/found.md).
    "llama-lora-tight": (
        "llama",
        {
            "enable_lora": True,
            "max_loras": 3,
            "max_lora_rank": 8,
            "num_gpu_blocks_override": 12,
            "max_num_batched_tokens": 56,
            "max_num_seqs": 4,
        },
    ),
    "llama-loads-restart": (
        "llama",
        {
            "kv_transfer_config": LOADS,
            "num_gpu_blocks_override": 9,
            "max_num_batched_tokens": 12,
            "max_num_seqs": 3,
        },
    ),
    "llama-loads-refused": (
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
    ),
    "hybrid-page16": ("hybrid", {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4}),
    "recurrent-back": ("lfm2", {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 64, "max_num_seqs": 4}),
    "qwen-chunks": ("qwen", {"max_num_batched_tokens": 40, "max_num_seqs": 3}),
    "qwen-suffixes": ("qwen", {"max_num_batched_tokens": 96, "max_num_seqs": 5}),
    "qwen-resumes": ("qwen", {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 56, "max_num_seqs": 4}),
    "hybrid-weights": ("hybrid", {"max_num_batched_tokens": 112, "max_num_seqs": 4, "num_gpu_blocks_override": 80}),
    "delta-reused": (
        "qwen3_next",
        {"dtype": "bfloat16", "max_num_batched_tokens": 72, "num_gpu_blocks_override": 11, "max_num_seqs": 2},
    ),
    "delta-churn": (
        "qwen3_next",
        {"dtype": "bfloat16", "max_num_batched_tokens": 88, "num_gpu_blocks_override": 27, "max_num_seqs": 4},
    ),
    "qwen-loads-ends": (
        "qwen",
        {
            "kv_transfer_config": LOADS,
            "max_num_batched_tokens": 96,
            "num_gpu_blocks_override": 40,
            "max_num_seqs": 3,
        },
    ),
    "llama-loads-shifts": (
        "llama",
        {
            "kv_transfer_config": LOADS,
            "max_num_batched_tokens": 104,
            "num_gpu_blocks_override": 34,
            "max_num_seqs": 4,
        },
    ),
    "sliding-block64": (
        "sliding",
        {"block_size": 64, "max_num_batched_tokens": 76, "num_gpu_blocks_override": 20, "max_num_seqs": 3},
    ),
    "qwen-strides": (
        "qwen",
        {"block_size": 96, "max_num_batched_tokens": 60, "num_gpu_blocks_override": 22, "max_num_seqs": 4},
    ),
    "llama-lora-chunks": (
        "llama",
        {
            "enable_lora": True,
            "max_loras": 3,
            "max_lora_rank": 8,
            "max_num_batched_tokens": 44,
            "num_gpu_blocks_override": 50,
            "max_num_seqs": 3,
        },
    ),
    "hybrid-floors": (
        "hybrid",
        {"block_size": 16, "max_num_batched_tokens": 52, "num_gpu_blocks_override": 22, "max_num_seqs": 3},
    ),
    "qwen-synced": ("qwen", {"max_num_batched_tokens": 68, "num_gpu_blocks_override": 30, "max_num_seqs": 4}),
    "recurrent-tails": ("lfm2", {"max_num_batched_tokens": 56, "num_gpu_blocks_override": 36, "max_num_seqs": 3}),
    "qwen-loads-disk": (
        "qwen",
        {
            "kv_transfer_config": LOADS,
            "block_size": 64,
            "max_num_batched_tokens": 116,
            "num_gpu_blocks_override": 24,
            "max_num_seqs": 3,
        },
    ),
    "llama-lora-prompts": (
        "llama",
        {
            "enable_lora": True,
            "max_loras": 3,
            "max_lora_rank": 8,
            "max_num_batched_tokens": 84,
            "num_gpu_blocks_override": 44,
            "max_num_seqs": 4,
        },
    ),
    "qwen-loads-split": (
        "qwen",
        {
            "kv_transfer_config": LOADS,
            "max_num_batched_tokens": 88,
            "num_gpu_blocks_override": 28,
            "max_num_seqs": 2,
        },
    ),
    "llama-loads-leases": (
        "llama",
        {
            "kv_transfer_config": LOADS,
            "max_num_batched_tokens": 120,
            "num_gpu_blocks_override": 26,
            "max_num_seqs": 3,
        },
    ),
    "qwen-admits": ("qwen", {"max_num_batched_tokens": 100, "num_gpu_blocks_override": 34, "max_num_seqs": 3}),
}


def fired_in(forward: list[int]):
    """Return what a patch calls before the first forward that reads the damage: it leaves a mark in the trace."""

    def fired() -> None:
        from kvcanary.recorder.engines.vllm import hooks

        if forward:
            return
        for attachment in hooks.attachments:
            for recording in attachment.recordings.values():
                if recording is not None:
                    forward.append(int(recording.recorder.next_forward))
                    recording.recorder.mark("real bug", {"forward": forward[0]})

    return fired


def generate(setup: str, folder: Path) -> None:
    """Start the engine, let it answer seeded random prompts, some of which share a prefix, and shut it down."""
    from vllm import LLM, SamplingParams

    model, arguments = SETUPS[setup]
    arguments = dict(arguments)
    if "model" in arguments.get("speculative_config", {}):
        arguments["speculative_config"] = {
            **arguments["speculative_config"],
            "model": str(CONFORMANCE / "models" / "eagle"),
        }
    if "kv_transfer_config" in arguments:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    if model == "mrope":
        import mrope

        mrope.register()
    defaults = {
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 6,
        "async_scheduling": False,
        "block_size": 32,
        "dtype": "float32",
    }
    llm = LLM(
        model=str(CONFORMANCE / "models" / model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        seed=1,
        enable_prefix_caching=True,
        **{**defaults, **arguments},
    )
    if (
        setup == "recurrent-tails"
    ):  # weights that are made up are so small that no state would be seen in what comes of it
        llm.apply_model(enlarge_states)
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 600) for _ in range(count)]

    shared = tokens(70)
    prompts = [shared + tokens(rng.randrange(3, 30)) if i % 2 == 0 else tokens(rng.randrange(5, 60)) for i in range(5)]
    again = [prompts[0] + tokens(4), shared[:66], tokens(96), prompts[2], shared[:64]]
    batches = [prompts, again]
    if "-few" in setup:  # what was cached is evicted while the last ones wait
        batches.append([tokens(100), tokens(98), tokens(101), prompts[0], prompts[2], tokens(40)])
    if setup == "llama-parts":  # blocks that come again behind others, or at another place
        prompts[3] = tokens(80)
        prompts[0] = shared + tokens(40)
        batches = [prompts, [shared[:32] + prompts[3][32:64] + tokens(20), shared[32:64] + tokens(40)], again]
    if setup == "llama-loads-parts":  # that go apart inside a block
        batches = [prompts, [shared[:68] + tokens(50), shared[:68] + tokens(44)], again]
    if setup == "llama-loads-back":  # that come again when all blocks have been written by others
        batches = [prompts, [tokens(100), tokens(98), tokens(101)], again]
    if setup == "llama-loads-middle":  # that go on behind a block that is there already
        batches = [prompts, [shared[:40], prompts[0] + tokens(4), prompts[2] + tokens(3)], again]
    if setup == "delta-units":  # that go on inside a block, behind a prompt that ends there
        prompts[1] = tokens(56)
        batches = [prompts, [prompts[1][:49] + tokens(12), prompts[1] + tokens(20), prompts[1][:50] + tokens(5)], again]
    if setup == "llama-loads-two":  # that have nothing in common and come again together
        prompts[1], prompts[3] = tokens(70), tokens(75)
        batches = [prompts, [prompts[1] + tokens(3), prompts[3] + tokens(5), *again]]
    if setup == "llama-loads-fails":  # one that loads, and one that joins it in the same step
        batches = [prompts, [shared + tokens(3), shared[:68] + tokens(5)], again]
    if setup == "llama-loads-alone":  # one that waits for its load while nothing else runs
        prompts[1] = tokens(70)
        batches = [prompts, [prompts[1] + tokens(3)], again]
    if setup == "llama-twins":  # one that computes anew a block that is there already, and others that want all blocks
        batches = [prompts, [shared[:64], tokens(100), tokens(98)], again]
    if setup == "llama-eagle-parts":  # that go apart right behind a block
        batches = [prompts, [shared[:64] + tokens(20), shared[:32] + tokens(12)], again]
    if setup == "hybrid-halves":  # that go apart in the middle of a block
        batches = [prompts, [prompts[0][:48] + tokens(30), shared[:20] + tokens(40)], again]
    if setup == "recurrent-short":  # that have a token more than what they hit
        batches = [prompts, [shared[:65], shared[:33]], again]
    if setup == "recurrent-little":  # the first of which fits in a block with its answer
        batches = [[tokens(9), *prompts], again]
    if setup == "recurrent-together":  # the second begins with what the first has just begun to compute
        prompts[1] = shared[:64] + tokens(6)
        batches = [prompts, again]
    if setup == "llama-aborts":  # two that begin alike, one of which is aborted, and others that want all blocks
        batches = [[shared + tokens(6), shared + tokens(12), *(tokens(80 + i) for i in range(5))], again]
    if setup == "recurrent-ones":  # of a single token, when others have used the slots
        batches = [prompts, [tokens(1), *prompts[1:3], tokens(1)], [tokens(1)], again]
    if setup == "llama-lora-loads":  # for one tenant, for another, and for the first once more
        batches = [prompts, again, [prompts[0] + tokens(7), shared[:68], prompts[2] + tokens(2)]]
    if setup == "mrope-chunks":  # that take many steps
        batches = [[prompts[0], tokens(90), shared + tokens(3)], again, [tokens(75), shared[:50] + tokens(40)]]
    if setup == "llama-loads-aborts":  # one that waits for its load, and one that waits for its blocks
        batches = [prompts, [prompts[0] + tokens(3), tokens(100), tokens(60), tokens(140)], again]
    if setup == "delta-long":  # that fill several blocks, one behind another
        batches = [[shared + tokens(90), tokens(150), tokens(20)], [shared + tokens(60), tokens(110), shared[:66]]]
    if setup == "llama-chunks-back":  # that all grow together until there is no room
        batches = [[shared, tokens(50), tokens(61), tokens(44)], [shared[:60] + tokens(9), tokens(70), tokens(35)]]
    if setup == "llama-eagle-brim":  # that run until there is no place left in the longest context
        batches = [[tokens(231), tokens(90)], [shared + tokens(162), shared + tokens(170)], again[1:4]]
    if setup == "hybrid-crowd":  # several of which are computed in one step
        batches = [[tokens(70), shared + tokens(9), tokens(24), tokens(38)], [shared + tokens(30), tokens(85)], again]
    if setup == "sliding-tight":  # of many chunks, while there are no blocks to spare
        batches = [[tokens(170), tokens(130), tokens(150)], [tokens(190), shared + tokens(90), tokens(120)]]
    if setup == "llama-loads-turns":  # two that grow alike, and then go on where their answers end
        batches = [[tokens(100), tokens(100)], [tokens(11), tokens(6)], [tokens(40)]]
    if setup == "llama-loads-rest":  # whose beginning is there when the rest of them comes
        longer = [shared + tokens(60), tokens(45), shared + tokens(75)]
        batches = [longer, [shared[:52], tokens(30), longer[2] + tokens(6), longer[0] + tokens(9)]]
    if setup == "llama-lora-tight":  # of two tenants and of none, that all begin alike
        batches = [[shared + tokens(i + 3) for i in range(5)], [shared[:50] + tokens(9), *again]]
    if setup == "llama-loads-restart":  # the third is long, and the others grow while it is computed
        longer = shared + tokens(33)
        batches = [[tokens(52), tokens(59), longer], [longer + tokens(9), tokens(40)], [shared[:30]]]
    if setup == "llama-loads-refused":  # one after the other, that begin alike when the first ones have gone
        prompts[1] = tokens(75)
        batches = [prompts, [prompts[1] + tokens(4), shared + tokens(3), shared[:68] + tokens(5), tokens(20)]]
    if setup == "hybrid-page16":  # some of which are longer than a window, and some come to be
        batches = [[tokens(20), shared + tokens(12), tokens(39)], [shared + tokens(2), tokens(58), shared[:30]]]
    if setup == "recurrent-back":  # that grow until there is no room for all
        batches = [[tokens(50), tokens(61), tokens(44), tokens(57)], [shared + tokens(9), tokens(70), tokens(52)]]
    if setup == "qwen-chunks":  # of several chunks each
        batches = [[tokens(95), tokens(33), tokens(110)], [shared + tokens(50), shared[:64] + tokens(41), tokens(12)]]
    if setup == "qwen-suffixes":  # of which some go on for long behind what they hit
        batches = [
            [shared, tokens(45), shared[:20]],
            [shared + tokens(40), shared[:66], shared[:35] + tokens(60)],
            again,
        ]
    if setup == "qwen-resumes":  # that all grow until some are put back, and come to other rows
        batches = [[tokens(33), tokens(47), tokens(26), tokens(39)], [shared[:48], tokens(29), shared[:37] + tokens(8)]]
    if setup == "hybrid-weights":  # turns of talks that go on under new weights
        longer = [shared + tokens(21), tokens(83), shared[:40] + tokens(33)]
        batches = [longer, [longer[0] + tokens(6), tokens(30), longer[1] + tokens(9)], [longer[2] + tokens(14), shared]]
    if setup == "delta-reused":  # two at a time, each of which gets what the ones before have left
        batches = [
            [tokens(88), tokens(41), tokens(6), tokens(52), tokens(9)],
            [tokens(12), tokens(4), shared + tokens(3), tokens(7), tokens(5)],
            [tokens(3), tokens(5), tokens(2), tokens(8)],
        ]
    if setup == "delta-churn":  # that come and go while others are computed
        batches = [
            [tokens(61), tokens(90), tokens(37), tokens(72)],
            [shared + tokens(5), tokens(49), shared + tokens(20)],
        ]
    if setup == "qwen-loads-ends":  # that are gone on with behind answers, some of which end where a block does
        batches = [[tokens(37), tokens(50), shared[:45]], [tokens(5), tokens(9), tokens(7)], [tokens(20), tokens(41)]]
    if setup == "llama-loads-shifts":  # that go on at different lengths behind what has been asked before
        longer = [shared + tokens(18), tokens(51), shared[:58]]
        batches = [longer, [longer[0] + tokens(40), longer[1] + tokens(7), tokens(22), shared + tokens(35)], again[2:]]
    if setup == "sliding-block64":  # of less than a window and of several
        batches = [[tokens(17), tokens(120), tokens(44)], [shared + tokens(50), tokens(26), shared[:61]]]
    if setup == "qwen-strides":  # that are computed in rows of two to four
        batches = [
            [tokens(24), tokens(51), tokens(33), tokens(12)],
            [shared[:49], tokens(38), shared[:35] + tokens(20)],
        ]
    if setup == "llama-lora-chunks":  # of one to four chunks, for two tenants and for none
        batches = [
            [tokens(30), shared + tokens(31), tokens(73)],
            [shared + tokens(8), tokens(25), tokens(90), tokens(52)],
        ]
    if setup == "hybrid-floors":  # of one window to three, while others want the blocks that they leave
        batches = [
            [tokens(90), tokens(35), tokens(50), tokens(28), tokens(61)],
            [shared + tokens(26), tokens(58), shared[:50]],
        ]
    if setup == "qwen-synced":  # that begin alike before and behind new weights
        batches = [
            [shared + tokens(17), tokens(40), shared[:50]],
            [shared + tokens(25), tokens(66), tokens(21)],
            [shared[:66] + tokens(12), tokens(19)],
        ]
    if setup == "recurrent-tails":  # that end a few tokens behind a block, and are gone on with from that block's end
        batches = [
            [shared + tokens(9), tokens(47)],
            [shared[:64] + tokens(20), tokens(25)],
            [tokens(36), shared[:64] + tokens(33)],
        ]
    if setup == "qwen-loads-disk":  # of one block and a bit, or of two
        batches = [[shared + tokens(11), tokens(133), tokens(37)]]
        batches += [[shared + tokens(20), tokens(30)], [batches[0][1] + tokens(8), shared[:66] + tokens(70)]]
    if setup == "llama-lora-prompts":  # of two tenants and of none, some of which go on behind what they hit
        batches = [
            [tokens(41), shared + tokens(6), tokens(58)],
            [shared + tokens(17), tokens(36), shared + tokens(28), tokens(9)],
        ]
    if setup == "qwen-loads-split":  # that come again, and go on behind one block or two
        longer = [shared + tokens(15), tokens(45), tokens(99)]
        batches = [longer, [longer[0] + tokens(7), longer[1][:36] + tokens(30)], [longer[2] + tokens(5), tokens(28)]]
    if setup == "llama-loads-leases":  # so many that what was kept first comes again when others have been kept since
        longer = [shared + tokens(8), tokens(72), tokens(100), tokens(68)]
        batches = [longer[:2], longer[2:], [longer[0] + tokens(4), longer[3] + tokens(11)], [tokens(31), longer[1]]]
    if setup == "qwen-admits":  # one after another, while others are answered
        batches = [
            [tokens(34), tokens(27), tokens(62), tokens(41), tokens(19)],
            [shared[:45], tokens(38), shared[:32] + tokens(22), tokens(50)],
        ]
    if setup.startswith("qwen-ngram"):
        prompts[1] = tokens(6) * 6
    lora: list = [None] * len(batches)
    if setup == "llama-lora":
        lora = [adapter(folder, 1), adapter(folder, 2)]
    if setup == "llama-lora-mixed":  # one after the other in each batch
        both = adapter(folder, 1), adapter(folder, 2, "other tenant")
        lora = [[both[i % 2] for i in range(len(batch))] for batch in batches]
    if (
        setup == "llama-lora-salts"
    ):  # and then the base model, some of whose requests have the adapter's name as their salt
        lora = [adapter(folder, 1, "tenant 1"), None]
    if setup == "llama-lora-tight":
        both = adapter(folder, 1, "tenant 1"), None, adapter(folder, 2, "tenant 2")
        lora = [[both[(i + number) % 3] for i in range(len(batch))] for number, batch in enumerate(batches)]
    if setup == "llama-lora-chunks":
        both = adapter(folder, 1, "tenant 1"), adapter(folder, 2, "tenant 2"), None
        lora = [[both[(i + number) % 3] for i in range(len(batch))] for number, batch in enumerate(batches)]
    if setup == "llama-lora-prompts":
        both = adapter(folder, 1, "tenant 1"), adapter(folder, 2, "tenant 2"), None
        lora = [[both[(2 * i + number) % 3] for i in range(len(batch))] for number, batch in enumerate(batches)]
    if setup == "llama-lora-loads":
        both = adapter(folder, 1, "tenant 1"), adapter(folder, 2, "tenant 2")
        lora = [both[0], both[1], both[0]]
    if setup == "llama-lora-reload":  # of other weights behind the first batch
        lora = [adapter(folder, 1)] * len(batches)
    outputs = []
    for number, batch in enumerate(batches):
        if number == 1 and setup == "llama-lora-reload":
            llm.llm_engine.remove_lora(1)
            adapter(folder, 1, seed=2)
            llm.reset_prefix_cache()
        elif number == 1 and setup == "llama-loads-weights":
            import torch

            weights = (
                "model.layers.0.input_layernorm.weight",
                torch.randn(96, generator=torch.Generator().manual_seed(7)),
            )
            llm.apply_model(lambda model, new=weights: model.load_weights([new]))
            llm.reset_prefix_cache(reset_connector=True)
        elif number == 1 and setup == "hybrid-weights":
            import torch

            size = llm.llm_engine.model_config.get_hidden_size()
            drawn = torch.randn(size, generator=torch.Generator().manual_seed(11))
            weights = ("model.layers.0.input_layernorm.weight", drawn)
            llm.apply_model(lambda model, new=weights: model.load_weights([new]) and None)
            llm.reset_prefix_cache()
        elif number == 1 and setup == "qwen-synced":
            import torch

            drawn = torch.randn(64, generator=torch.Generator().manual_seed(13))
            weights = ("model.layers.0.input_layernorm.weight", drawn)
            llm.apply_model(lambda model, new=weights: model.load_weights([new]) and None)
            llm.reset_prefix_cache()
        elif number == 1 and setup == "llama-sleeps":  # what it wakes up with is new memory
            llm.reset_prefix_cache()
            llm.collective_rpc(lambda worker: [cache.zero_() for cache in worker.model_runner.kv_caches] and None)
        elif number and "kv_transfer_config" in arguments:
            llm.reset_prefix_cache()
        sampling = [
            SamplingParams(max_tokens=rng.randrange(8, 30), temperature=0, ignore_eos=True, detokenize=False)
            for _ in batch
        ]
        given = [{"prompt_token_ids": prompt} for prompt in batch]
        if setup.endswith("salts") and (number or setup != "llama-lora-salts"):
            given = [{**one, "cache_salt": f"tenant {i % 2 + number}"} for i, one in enumerate(given)]
        if setup == "llama-embeds":  # all of them different
            import torch

            drawn = torch.Generator().manual_seed(number + 1)
            given = [{"prompt_embeds": torch.randn(len(prompt), 96, generator=drawn)} for prompt in batch]
        if setup == "llama-aborts":
            outputs += with_aborts(llm, number, given, sampling)
            continue
        if setup == "llama-loads-aborts":
            outputs += with_an_abort_while_it_loads(llm, number, given, sampling)
            continue
        if setup == "llama-lora-added":
            outputs += with_added_adapters(llm, number, given, sampling, folder)
            continue
        if setup == "llama-loads-turns" and number == 1:  # of the first answers there are many tokens in the question
            given = [
                {"prompt_token_ids": asked + answer[:42] + prompt}
                for asked, answer, prompt in zip(batches[0], outputs, batch, strict=True)
            ]
        if setup == "qwen-loads-ends" and number == 1:
            given = [
                {"prompt_token_ids": asked + answer + prompt}
                for asked, answer, prompt in zip(batches[0], outputs, batch, strict=True)
            ]
        if setup == "qwen-loads-ends" and number == 0:  # the first two end with a block, the third in the middle of one
            for one, count in zip(sampling, (27, 46, 24), strict=True):
                one.max_tokens = count
        if setup in ("llama-eagle-brim", "llama-loads-turns"):
            for one, question in zip(sampling, given, strict=True):
                one.max_tokens = min(26 if "brim" in setup else 46, 256 - len(question["prompt_token_ids"]))
        if setup in ("llama-chunks-back", "qwen-ngram-five", "sliding-tight", "llama-loads-restart", "recurrent-back"):
            for one in sampling:
                one.max_tokens += 30
        if setup in ("qwen-resumes", "delta-churn", "delta-reused", "hybrid-floors"):
            for one in sampling:
                one.max_tokens += 32
        if setup == "llama-streaming":
            outputs += with_further_input(llm, number, given, sampling)
            continue
        if setup == "llama-weights-running":
            outputs += with_new_weights(llm, number, given, sampling)
            continue
        outputs += [
            list(o.outputs[0].token_ids)
            for o in llm.generate(given, sampling, use_tqdm=False, lora_request=lora[number])
        ]
    (folder / "tokens.json").write_text(json.dumps(outputs))
    llm.llm_engine.engine_core.shutdown()


def enlarge_states(model: Any) -> None:
    """Make what goes into the states of a model's convolutions, and what comes of them, large enough to be seen."""
    for name, weight in model.named_parameters():
        if name.endswith(("operator_norm.weight", "conv.weight")):
            weight.data.mul_(1e5 if "norm" in name else 1e3)


def with_aborts(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step; the first is aborted while it runs with the others."""
    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        one.max_tokens += 40 * (i == 1)
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step == 6:
            engine.abort_request([f"{number}-0"])
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_an_abort_while_it_loads(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step; the first of the second batch is aborted when the step that begins its load has ended."""
    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if (number, step) == (1, 1):
            engine.abort_request(["1-0"])
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_added_adapters(llm: Any, number: int, prompts: list, sampling: list, folder: Path) -> list[list[int]]:
    """Answer prompts for two tenants by turns, step by step; while all are being answered a third and a fourth are added."""
    engine, answers = llm.llm_engine, {}
    both = [adapter(folder, i, f"tenant {i}") for i in (1, 2)]
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        one.max_tokens += 16
        engine.add_request(f"{number}-{i}", prompt, one, lora_request=both[i % 2])
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step in (9, 17):
            more = 3 + (step > 9)
            engine.add_lora(adapter(folder, more, f"tenant {more}"))
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_further_input(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step, each of which goes on with the end of the next one behind its answer; all are put back once."""
    from collections import defaultdict

    from vllm.sampling_params import RequestOutputKind

    engine, answers = llm.llm_engine, defaultdict(list)

    def add(i: int, tokens: list[int], more: bool) -> None:
        one = sampling[i].clone()
        one.output_kind = RequestOutputKind.DELTA
        request = engine.input_processor.process_inputs(
            f"{number}-{i}",
            {"prompt_token_ids": tokens},
            one,
            supported_tasks=engine.get_supported_tasks(),
            resumable=more,
        )
        request.external_req_id = request.request_id
        engine.output_processor.add_request(request, None, None, 0)
        engine.engine_core.add_request(request)

    for i, prompt in enumerate(prompts):
        add(i, prompt["prompt_token_ids"], True)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step == 4:
            for i in range(len(prompts)):
                add(i, prompts[(i + 1) % len(prompts)]["prompt_token_ids"][-9:], True)
                add(i, [0], False)  # no more than that
        if step == 20:
            llm.reset_prefix_cache(reset_running_requests=True)
        for o in engine.step():
            answers[o.request_id] += o.outputs[0].token_ids
    return [answers[name] for name in sorted(answers)]


def with_new_weights(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step; the first ones get new weights while they run, and another that begins as they do."""
    import torch

    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step == 10 and number == 0:
            new = torch.randn(96, generator=torch.Generator().manual_seed(7))
            weights = ("model.layers.0.input_layernorm.weight", new)
            llm.apply_model(lambda model, new=weights: model.load_weights([new]))
            llm.reset_prefix_cache(reset_running_requests=True)
        if step == 12 and number == 0:
            again = {"prompt_token_ids": prompts[0]["prompt_token_ids"][:70]}
            engine.add_request(f"{number}-again", again, sampling[1].clone())
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def adapter(folder: Path, number: int, called: str = "tenant", seed: int = 0) -> Any:
    """Write an adapter of random weights for the tiny Llama; return what a request names it by: all have one name unless told."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    place = folder / f"adapter{number}"
    place.mkdir(exist_ok=True)
    shape = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA", "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps({**shape, "base_model_name_or_path": "llama"}))
    drawn, weights = torch.Generator().manual_seed(seed or number), {}
    for layer in range(3):
        for name, width in (("q_proj", 192), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            weights[f"{at}_A.weight"] = torch.randn(8, 96, generator=drawn)
            weights[f"{at}_B.weight"] = torch.randn(width, 8, generator=drawn)
    save_file(weights, place / "adapter_model.safetensors")
    return LoRARequest(called, number, str(place))


def run(name: str, folder: Path) -> int:
    """Run one bug, or a setup without any; return the exit status."""
    import signal
    import time

    from bugs import load

    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["KVCANARY_TRACE"] = str(folder / "traces")
            from kvcanary.recorder.engines.vllm import hooks

            hooks.install()
            if name.startswith("clean:"):
                generate(name.removeprefix("clean:"), folder)
            else:
                bug = load("vllm")[name]
                bug.patch(fired_in([]))
                generate(bug.setup, folder)
            status = 0
        except BaseException:  # noqa: BLE001  # printed, and the child ends: it must not come back into the loop
            import traceback

            traceback.print_exc()
        finally:
            from kvcanary.recorder.engines.vllm import hooks

            for attachment in hooks.attachments:
                for recorder in attachment.recorders():
                    recorder.close()
            sys.stdout.flush()
            os._exit(status)
    for _ in range(2400):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


if __name__ == "__main__":
    from engine import ENVIRONMENT, import_engine

    wanted = {
        **ENVIRONMENT,
        "KVCANARY_COMPRESSION": "zstd",
        "KVCANARY_FLUSH_INTERVAL_MS": "3600000",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(CONFORMANCE), os.environ.get("PYTHONPATH", "")]),
    }
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    import_engine()
    for one in sys.argv[2:]:
        print(one, run(one, Path(sys.argv[1]) / one.replace(":", "-")), flush=True)
