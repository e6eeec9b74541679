"""Runs SGLang with its online canary and the recorder together, and compares what both found, row for row.

    python tests/conformance/sglang/run.py                    # the whole matrix, and docs/results/conformance-sglang.md
    python tests/conformance/sglang/run.py --seeds 1 --only llama --no-write

Exit status 1 where a run differs.
"""

import argparse
import datetime
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "results" / "conformance-sglang.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep logs, traces and reports in this folder")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a run")
    parser.add_argument("--no-write", action="store_true", help=f"leave {DOCUMENT.name} as it is")
    return parser.parse_args()


def main() -> int:
    from engine import ENVIRONMENT

    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    from configurations import FAULTS, matrix
    from engine import import_engine, run_forked
    from inside import ALONE

    args = arguments()
    runs = [run for run in matrix(args.seeds) if args.only in run.name]
    folder = args.keep or Path(tempfile.mkdtemp(prefix="conformance-sglang-"))
    folder.mkdir(parents=True, exist_ok=True)
    import_engine()
    results = []
    for number, run in enumerate(runs, 1):
        started = time.monotonic()
        place = folder / run.name
        shutil.rmtree(place, ignore_errors=True)
        status = run_forked(run, place, args.timeout)
        result = compare_apart(place)
        if status != 0:
            result["differences"].insert(0, f"the engine ended with {status}, see its log")
        if not FAULTS[run.fault][0] and result["verdict"] != "clean":
            result["differences"].append(f"no fault was injected, and the replay says {result['verdict']}")
        alone = ALONE.get(run.fault)
        if alone is not None and not 0 < result["findings"].get(alone, 0) <= result["injected"]:
            result["differences"].append(f"{result['injected']} faults, {result['findings']} found, expected {alone}")
        results.append((run, result))
        said = "equal" if not result["differences"] else "DIFFERS"
        print(
            f"[{number}/{len(runs)}] {run.name}: {said}   {result['forwards']} forwards, {result['injected']} faults, "
            f"{result['online_rows']} online rows, {result['offline_rows']} offline, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        for difference in result["differences"][:5]:
            print(f"    {difference}", flush=True)
    if not args.no_write:
        DOCUMENT.write_text(document(results, whole=len(runs) == len(matrix(3))))
    if not args.keep:
        shutil.rmtree(folder)
    return int(any(result["differences"] for _, result in results))


def compare_apart(folder: Path) -> dict:
    """Compare in a process of its own: what it imports has threads, which a forked engine must not inherit."""
    import json
    import subprocess

    code = (
        "import dataclasses, json, sys, pathlib; from compare import compare; "
        "print(json.dumps(dataclasses.asdict(compare(pathlib.Path(sys.argv[1])))))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False, cwd=HERE
    )
    if ran.returncode:
        empty = {"forwards": 0, "injected": 0, "online_rows": 0, "offline_rows": 0, "slots_looked_at": 0}
        return {**empty, "verdict": "", "findings": {}, "differences": [f"not compared: {ran.stderr.strip()[-500:]}"]}
    return json.loads(ran.stdout.splitlines()[-1])


def document(results: list, *, whole: bool) -> str:
    import importlib.metadata

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "torch", "kvcanary"))
    equal = sum(not result["differences"] for _, result in results)
    injected = sum(result["injected"] for _, result in results)
    rows = sum(result["online_rows"] for _, result in results)
    looked_at = sum(result["slots_looked_at"] for _, result in results)
    lines = [
        "# SGLang: the replay against the online canary",
        "",
        "Made by `make conformance-sglang`; do not edit. Each run is an SGLang engine on the CPU with its own online canary",
        "(`--kv-canary log`, K and V) and its fault injector, with the recorder attached. Equal means: the replay of the",
        "trace finds the same violations in the same forward (launch tag, reasons, slot, position, tokens, hashes), as",
        "multisets, and each launch tag has looked at as many slots as online. The online rows are the canary's ring after",
        "each of its steps; its log, which is a step late, must hold no other rows.",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {versions}, Python {platform.python_version()}, {platform.machine()}.",
        "" if whole else "\n**Not the whole matrix.**\n",
        f"**{equal} of {len(results)} runs equal**, {injected} faults, {rows} online rows, {looked_at} slots looked at.",
        "",
        "| run | forwards | faults | online rows | offline rows | verdict of the replay | findings beyond the canary's | |",
        "|---|--:|--:|--:|--:|---|---|---|",
    ]
    for run, result in results:
        findings = ", ".join(f"{name} {count}" for name, count in result["findings"].items())
        said = "equal" if not result["differences"] else "**differs**"
        lines.append(
            f"| {run.name} | {result['forwards']} | {result['injected']} | {result['online_rows']} | "
            f"{result['offline_rows']} | {result['verdict']} | {findings} | {said} |"
        )
    differing = [(run, result) for run, result in results if result["differences"]]
    if differing:
        lines += ["", "## Differences", ""]
        for run, result in differing:
            lines += [f"**{run.name}**", "", *(f"- {difference}" for difference in result["differences"][:10]), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
