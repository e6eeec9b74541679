"""docs/results/overhead.md, from the figures that `recorder_overhead.py` takes."""

import statistics
from collections.abc import Sequence
from typing import Any

BUDGET_US = 60  # of the engine's thread, at the median of a decode

# Measured once, before the machine code went: it cannot be run again.
LAUNCHES = """
## Launches by machine code or by Triton

Until 2026-11-22 the recorder had LLVM make machine code that filled in a launch's parameters, called the CUDA driver and
counted tokens, past Python. It took 6 to 12 us off the engine's thread in a step, and went because no step got shorter.
One engine changed the way of its launches every 8 steps: machine code, ctypes, Triton's own launcher. A step's growth with
its requests' lengths is taken off; the medians of the blocks are compared, and the range holds 95 of 100 resamples. The
same tokens came out of two generations in which each step was launched in another way. NVIDIA H200, SGLang 0.5.16.

| work | step | ctypes against machine code | Triton against machine code | in the ticket's launch: machine code, ctypes, Triton |
|---|--:|---|---|--:|
| decode 64 x 8,192 | 34.2 ms | -0.02 % (-0.20 to +0.13) | -0.04 % (-0.21 to +0.12) | 23, 31, 35 us |
| decode 256 x 1,024 | 22.3 ms | -0.06 % (-0.21 to +0.09) | +0.04 % (-0.14 to +0.20) | 22, 29, 35 us |
| decode 8 x 2,048 | 7.5 ms | -0.01 % (-0.17 to +0.15) | -0.00 % (-0.16 to +0.14) | 18, 24, 30 us |

## What an allocation gives out, by itself or with the next forward's frame

Until 2026-11-23 each allocation's slots were copied to the host by a copy and an event of their own; since then the launch
that is there for the next forward copies them. The tables above are from before that. Ten small SGLang engines ran beside one
another on one slow host (NVIDIA H200, SGLang 0.5.16, CUDA graphs, a model of four layers), one of them with the code of
before: all hooks of a decode took 135 us, before 185 (2 requests), and 125, before 170 (4 requests), at the median; of it
`others` 88, before 139, and 86, before 133.

## The hooks by themselves

`python benchmarks/hook_cost.py` times the hooks of a decode step without a GPU: engines that do nothing but decode are hooked
as on a GPU, and no kernel is launched. It is for two versions of the code, in turns on one machine. With the code of before
2026-11-23's last changes and with that of after them (2 cores that other work shared, caches cold, medians of 100 steps, two
turns each): SGLang with 256 requests, all hooks 189 and 192 us, then 142 and 121; the recorder's own threads 5.1 and 5.2 ms of
CPU time a step, then 1.9 and 1.6, since what a step allocates is one object there. vLLM's hooks (32 requests, 150 steps) 518
and 530 us, then 444 and 505 (V1), 469 and 426, then 474 and 434 (V2): no more than the noise of that machine. What they have
torch do on the engine's thread in each step: 7 operations, then 1 (V1), 4, then none (V2); `tests/recorder/test_hook_ops.py`
counts them.

vLLM 0.32, V2, on an H200, the shape of Llama 3 8B, 32 requests, same tokens; the three engines of a run in turns, each started as
`tests/conformance/vllm/gpu/overhead.py` starts them, one with an older checkout on its PYTHONPATH; 2026-11-23: on one host
5.416 ms unrecorded, 5.582 with the code of before (1.031), 5.524 with that of after the first of the changes (1.020), hooks of
steps and samples 466, then 364 us; on a slower host with all but the last of the changes 5.492, 5.723 (1.042), 5.850 (1.065), hooks 614, then
447 us, single turns of the three from 5.28 to 6.62. Of the GPU the recorder's kernels take 27 us a step by torch's profiler,
0.5 %. With SGLang the hooks have not been timed on a GPU since.

What made those steps longer was Python's lock: the recorder's thread computes about a millisecond in a step, and the
engine's thread gives the lock up in each operation of torch's, and gets it back when the other lets go. Now the recorder's
threads compute while vLLM's thread waits for a step's result, four frames at once, in slices of 0.1 ms. One run on an H200
with five engines as above, ten turns each, same tokens, 2026-11-23, medians (and the range of the turns):

| | step, ms | times as long | recorder's thread, CPU time a step |
|---|---|--:|--:|
| not recorded | 5.484 (5.386 to 5.551) | | |
| the code of before | 5.622 (5.450 to 5.899) | 1.025 | 1.25 ms |
| in the engine's pauses, four frames at once | 5.490 (5.306 to 5.874) | 1.001 | 0.91 ms |
| in its pauses, each frame by itself | 5.568 (5.488 to 5.800) | 1.015 | 1.31 ms |
| each frame at a moment after its launch, as before | 5.660 (5.521 to 5.914) | 1.032 | 1.13 ms |

In a run before that, of twelve turns, up to eight frames at once without regard to pauses took 1.059 (before: 1.019; hooks
and kernels alone, with nothing recorded of what they gave: 1.006). The hooks took 376 us a step, as before. An engine whose result is awaited on a thread of its own (vLLM with several workers), and SGLang, are recorded
each frame at a moment after its launch, as before.
"""

# The adapter's hooks, as the trace names them.
HOOKS = {
    "on_run before": "step begins",
    "on_model before": "before the model",
    "on_model after": "after the model",
    "on_run after": "step ends",
    "on_result before": "before a result",
    "on_result after": "after a result",
    "others": "others",
}


def summarize(runs: dict[str, list[dict]]) -> dict:
    """Return for each shape each mode's times, and their ratios to the runs of the same round without recorder."""
    figures: dict = {}
    for name in runs["off"][0]["shapes"]:
        base = [result["shapes"][name]["ms"] for result in runs["off"]]
        figures[name] = {"off": base}
        for mode, results in runs.items():
            if mode != "off":
                mine = [result["shapes"][name]["ms"] for result in results]
                figures[name][mode] = {"ms": mine, "ratios": [a / b for a, b in zip(mine, base, strict=False)]}
    return figures


def least(host: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return what a step has at least, with warm and with cold caches."""
    launch, hook = ([host[f"{thing}_{heat}_us"] for heat in ("warm", "cold")] for thing in ("launch", "hook"))
    both = [2 * one + 3 * other for one, other in zip(launch, hook, strict=True)]
    return [
        ("launch of an empty kernel", *launch),
        ("a hook that does nothing, before and after", *hook),
        ("a step: two launches and three hooks", *both),
    ]


def page(measured: Sequence[tuple[dict[str, Any], dict[str, list[dict]]]], decodes: list[str]) -> str:
    """Return the document: what was measured on each host, `(host, runs by mode)`."""
    lines = [
        "# What recording costs on a GPU",
        "",
        "Made by `python benchmarks/recorder_overhead.py --write` on a machine with a GPU; do not edit. One real SGLang",
        "engine a run, with CUDA graphs and overlapped scheduling, a model of the shape of Llama 3 8B (bfloat16, made-up",
        "weights), attention in Triton; the same prompts with and without the recorder, in alternation, and the same tokens",
        "came out. Decode is a step's time, from the difference of two generations off the same cached prompts; prefill is",
        "the time of one prompt of 8,192 tokens. The median of the repetitions of a run counts. The least and the most of",
        "them stand beside it: a GPU that has rested runs the first of them faster, by up to two hundredths, and now and",
        "then an engine stands still for a third of a second and more, recorded or not: presumably a full collection of",
        "Python's garbage, which looks at all that SGLang and its libraries have loaded. What a recorder keeps of each",
        "request brings the next one nearer; medians do not show that.",
        "",
        "The default settings compare the bytes of every forward's prefix with those that were written (KV watch), and record",
        "each slot that is given out and taken back, so there is no dearer setting but a larger `KVCANARY_CAPTURE_BYTES`,",
        "segments, and sweeps, which wait for the device.",
        "",
        "Time on the engine's thread is that of all hooks of a step together, launches and waiting for Python's lock",
        f"included; the budget is {BUDGET_US} us at the median of a decode. What captures a forward is part of its CUDA graph;",
        "one launch right before the graph says where to, which is most of what others take.",
        "The same code takes longer in a longer step, whose caches have seen more of other things since the last one, and",
        "hosts of one kind differ; the least that there is to it is measured on the same host in the same run, by itself.",
        "The slowest hundredth are steps in which many requests begin or end; each of those is recorded by itself.",
        "",
        "A forward's bytes are mostly block-table entries: each of these generations hits prefixes of up to 524,288 cached",
        "tokens, and each slot that a request takes over from the cache is recorded once.",
    ]
    for number, (host, runs) in enumerate(measured, 1):
        lines += [
            "",
            f"## Host {number}" if len(measured) > 1 else "## Measured",
            "",
            *_host_section(host, runs, decodes),
        ]
    return "\n".join(lines) + "\n" + LAUNCHES


def _host_section(host: dict[str, Any], runs: dict[str, list[dict]], decodes: list[str]) -> list[str]:
    """Return what was measured on one host: the ratios, then what the recording took of each of the decode shapes."""
    rounds = len(runs["off"])
    versions = f"SGLang {runs['off'][0]['sglang']}, torch {host['torch']}"
    modes = [mode for mode in runs if mode != "off"]
    lines = [
        f"{host['date']}, {host['device']}, {versions}, {rounds} round{'s' * (rounds > 1)}.",
        "",
        "| work | without, ms | " + " | ".join(f"{mode}: times as long, each round | ms" for mode in modes) + " |",
        "|---|---|" + "--:|---|" * len(modes),
    ]
    for name, figure in summarize(runs).items():
        cells = [f"{statistics.median(figure['off']):.2f} {_range(runs['off'], name)}"]
        for mode in modes:
            cells.append(", ".join(f"{ratio:.4f}" for ratio in figure[mode]["ratios"]))
            cells.append(f"{statistics.median(figure[mode]['ms']):.2f} {_range(runs[mode], name)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "Time on the engine's thread, a step:",
        "",
        "| settings | "
        + " | ".join(f"{name}, median" for name in decodes)
        + " | all steps, median | all steps, 99 % |",
        "|---|" + "--:|" * (len(decodes) + 2),
    ]
    recorded = [(mode, result["recording"]) for mode in modes for result in runs[mode]]
    for mode, one in recorded:
        shown = [one["engine_thread_us_by_decode"].get(name) for name in decodes]
        shown += [one["engine_thread_us_p50"], one["engine_thread_us_p99"]]
        lines.append(f"| {mode} | " + " | ".join("" if us is None else f"{us:.0f} us" for us in shown) + " |")
    over = [
        f"{mode}, {name}"
        for mode, one in recorded
        for name, took in one["engine_thread_us_by_decode"].items()
        if took > BUDGET_US
    ]
    lines += ["", f"Over the budget: {'; '.join(over) or 'none'}."]
    lines += [
        "",
        "What the medians consist of, hook by hook, the median of each:",
        "",
        "| settings | work | " + " | ".join(HOOKS.values()) + " |",
        "|---|---|" + "--:|" * len(HOOKS),
    ]
    for mode, one in recorded:
        for name, hooks in one["hooks_us_by_decode"].items():
            lines.append(f"| {mode} | {name} | " + " | ".join(f"{hooks[hook]:.0f} us" for hook in HOOKS) + " |")
    lines += [
        "",
        "The least that there is to it:",
        "",
        "| | warm caches | 64 MiB of other things touched before |",
        "|---|--:|--:|",
        *[f"| {thing} | {warm:.1f} us | {cold:.1f} us |" for thing, warm, cold in least(host)],
        "",
        "What one run recorded, over all its work:",
        "",
        "| settings | bytes a forward | bytes a token | device memory | pinned | lost |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for mode, one in recorded:
        lines.append(
            f"| {mode} | {one['bytes_a_forward']:,.0f} | {one['bytes_a_token']:,.0f} | {one['device_mib']:.0f} MiB | "
            f"{one['pinned_mib']:.0f} MiB | {one['losses']} |"
        )
    return lines


def _range(results: list[dict], name: str) -> str:
    """Return the least and the most of all repetitions of a shape, and how many a run has."""
    taken = [result["shapes"][name]["all"] for result in results]
    return f"({min(map(min, taken)):.2f} to {max(map(max, taken)):.2f}, of {len(taken[0])})"
