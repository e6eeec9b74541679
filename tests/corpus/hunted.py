"""An engine with a bug of the corpus in it, as a command for `kvcanary hunt`, or for `kvcanary shrink --run`.

kvcanary hunt --script -- .venv/bin/python tests/corpus/hunted.py transformers short_hash
kvcanary hunt -- .venv-sglang/bin/python tests/corpus/hunted.py sglang given_back_twice --model-path ... --port 30000

short_hash:0.4 has the bug in two of five runs.
"""

import json
import os
import random
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent


def patched(engine: str, name: str) -> None:
    """Put a bug into the engine of this process, which leaves no mark; in some processes alone if the name says so."""
    from bugs import load

    name, _, often = name.partition(":")
    if often and random.random() >= float(often):
        return
    load(engine)[f"{engine}-{name}"].patch(lambda: None)


def transformers(name: str) -> None:
    """Run the example's script."""
    sys.path.insert(0, str(HERE.parents[1] / "examples"))
    patched("transformers", name)
    import_module("hunt_transformers").main()


def vllm(name: str) -> None:
    """Run the example's script."""
    sys.path[:0] = [str(HERE.parents[1] / "examples"), str(HERE.parent / "conformance" / "vllm")]
    example = import_module("hunt_vllm")
    import_module("engine").import_engine()
    from kvcanary.recorder.engines.vllm import hooks

    hooks.install()  # before the bug, as in the corpus
    patched("vllm", name)
    example.main(sys.argv[3], **json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}"))


def sglang(name: str) -> None:
    """Start a server, whose processes are forked from this one."""
    sys.path.insert(0, str(HERE.parent / "conformance" / "sglang"))
    import_module("engine").import_engine()
    from sglang.launch_server import run_server
    from sglang.srt.managers.scheduler_components import invariant_checker
    from sglang.srt.server_args import prepare_server_args

    invariant_checker.raise_error_or_warn = lambda *args, **kwargs: None  # as in production, where nobody looks
    patched("sglang", name)
    run_server(prepare_server_args(sys.argv[3:]))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    {"transformers": transformers, "vllm": vllm, "sglang": sglang}[sys.argv[1]](sys.argv[2])
