"""Imported by every Python that has this folder on its path: the engine core's own process gets its faults here."""

import os
import sys
from pathlib import Path

if os.environ.get("CONFORMANCE_FAULT"):
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from kvcanary.recorder.engines.common.hooking import when_imported

    def install(_: object) -> None:
        from faults import install_faults

        install_faults()

    when_imported({"vllm.v1.worker.gpu_model_runner": install})
