"""Each fault of `kvcanary inject` in a real engine on the CPU, and each engine under the oracle without one.

    .venv-vllm/bin/python tests/conformance/injected.py vllm
    .venv-sglang/bin/python tests/conformance/injected.py sglang --only kv_used

Without a fault the replay must be clean, with every sampled token compared; with one it must be found in the very forward
that the mark names. Exit status 1 where something is otherwise. transformers:
tests/recorder/test_inject.py and test_oracle_sampling.py, the same on the real engine.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULTS = ("none", "req_to_token", "kv_used", "kv_unused_cache", "kv_post_forward", "next_token_swap")
# Chunked prefill and prefix hits are in all of them.
VLLM = ("llama", "llama-preempt", "llama-async-preempt", "hybrid-async", "llama-ngram")
SGLANG = (
    ("llama", 4, 2, False),
    ("llama", 1, 3, True),
    ("mellum_hybrid", 4, 2, False),
)  # the second overlaps, even seeds retract
NOT_COVERED = ("llama-ngram",)  # drafts are accepted, not sampled: the oracle says so, and all else is as ever


def of_vllm() -> list[tuple[str, Callable[[Path], int]]]:
    sys.path.insert(0, str(HERE / "vllm"))
    import engine
    from configurations import SETUPS, Run

    os.environ.update(engine.ENVIRONMENT)
    engine.import_engine()
    runs = []
    for setup in VLLM:
        run = Run(setup=setup, fault="none", seed=3)
        # What a cache alone holds is seen by sweeps.
        object.__setattr__(SETUPS[setup], "sweep", 3)
        runs.append((setup, lambda place, run=run: engine.run_forked(run, place, 300)))
    return runs


def of_sglang() -> list[tuple[str, Callable[[Path], int]]]:
    sys.path.insert(0, str(HERE / "sglang"))
    import engine

    if any(
        os.environ.get(name) != value for name, value in engine.ENVIRONMENT.items()
    ):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **engine.ENVIRONMENT})
    from configurations import Configuration

    engine.import_engine()
    runs = []
    for model, page, seed, overlap in SGLANG:
        run = Configuration(model=model, fault="none", group="full", page_size=page, seed=seed, overlap=overlap)
        name = f"{model}-page{page}{'-overlap' if overlap else ''}{'-retract' if run.retracts else ''}"
        runs.append((name, lambda place, run=run: engine.run_forked(run, place, 300)))
    return runs


def wrong_of(place: Path, setup: str, fault: str, status: int) -> tuple[list[str], str]:
    """Return what is wrong with a run, and what came of it in words."""
    traces = sorted((place / "traces").glob("*.arrow"))
    if status or len(traces) != 1:
        return [f"the engine ended with {status} and left {len(traces)} traces, see {place / 'log'}"], ""
    command = [Path(sys.executable).with_name("kvcanary-replay"), "--no-report", "--json", str(traces[0])]
    summary = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    oracle, wrong = summary["oracle"], []
    if fault == "none":
        if summary["verdict"] != "clean":
            wrong.append(f"no fault, and the verdict is {summary['verdict']}: {summary['findings_by_kind']}")
        judged = oracle.get("sampled_judged", 0), oracle.get("sampled", 0)
        if setup not in NOT_COVERED and not 0 < judged[0] == judged[1]:
            wrong.append(f"{judged[0]} of {judged[1]} sampled tokens compared")
        return wrong, f"clean, {judged[0]} of {judged[1]} sampled tokens and {oracle.get('fed_judged', 0)} fed compared"
    if len(summary["injected"]) != 1:
        return ["nothing was injected"], ""
    (one,) = summary["injected"]
    if one["found_forward"] != one["forward"]:
        wrong.append(f"not found in its forward: {one}")
    return wrong, f"injected in forward {one['forward']}, found in {one['found_forward']} by {one['found_by']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep logs and traces in this folder")
    args = parser.parse_args()
    runs = of_vllm() if args.engine == "vllm" else of_sglang()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="conformance-injected-"))
    failed = total = 0
    for setup, run in runs:
        for fault in FAULTS if setup not in NOT_COVERED else FAULTS[:1]:
            name = f"{setup}-{fault}"
            if args.only not in name:
                continue
            place = folder / name
            shutil.rmtree(place, ignore_errors=True)
            os.environ["KVCANARY_ORACLE"] = "hash"
            os.environ.pop("KVCANARY_INJECT", None)
            if fault != "none":
                os.environ["KVCANARY_INJECT"] = json.dumps({"fault": fault, "at": 15, "request": "", "seed": 1})
            wrong, said = wrong_of(place, setup, fault, run(place))
            failed, total = failed + bool(wrong), total + 1
            print(f"{name}: {said or 'WRONG'}", *[f"\n    WRONG: {one}" for one in wrong], flush=True)
    print(f"{total - failed} of {total} as they should be")
    if not args.keep:
        shutil.rmtree(folder)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
