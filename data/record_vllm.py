"""Record the traces in data/vllm/ from vLLM on the CPU, in the environment that `make conformance-vllm` makes.

    .venv-vllm/bin/python data/record_vllm.py             # both, here
    .venv-vllm/bin/python data/record_vllm.py -o /tmp     # elsewhere

The engine, its models and the injected faults are those of tests/conformance/vllm.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "conformance" / "vllm"))

# trace -> setup, fault, seed
TRACES = {
    "clean_hybrid_vllm": ("hybrid-preempt", "none", 14),
    "slot_mapping_vllm": ("llama-async", "slot_mapping", 2),
}


def main() -> int:
    """Record both."""
    from engine import ENVIRONMENT

    environment = {**ENVIRONMENT, "KVCANARY_COMPRESSION": "zstd", "KVCANARY_FLUSH_INTERVAL_MS": "3600000"}
    if any(os.environ.get(name) != value for name, value in environment.items()):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    from configurations import Run
    from engine import import_engine, run_forked

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "vllm", help="folder for the traces")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    import_engine()
    with tempfile.TemporaryDirectory() as folder:
        for name, (setup, fault, seed) in TRACES.items():
            place = Path(folder) / name
            status = run_forked(Run(setup=setup, fault=fault, seed=seed), place, 300.0)
            if status != 0:
                print(
                    f"{name}: the engine ended with {status}:\n{(place / 'log').read_text()[-2000:]}", file=sys.stderr
                )
                return 1
            (trace,) = (place / "traces").glob("*.arrow")
            shutil.copyfile(trace, output / f"{name}.arrow")
            print(f"{output / name}.arrow   {trace.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
