"""Running SGLang engines on the GPUs side by side, each in a process group of its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine to run: `place` is its folder, `told` what `engine.py` is told, `environment` what it adds to ours."""

    place: Path
    told: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


def run_side_by_side(engines: list[Engine], folder: Path, timeout_s: float) -> None:
    """Run all engines; each one's log and exit status go into its folder, and what is left after the time is killed."""
    plugins = _write_plugin(folder)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVCANARY_")}
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(plugins), os.environ.get("PYTHONPATH")]))
    ours |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}
    started = {}
    for engine in engines:
        shutil.rmtree(engine.place, ignore_errors=True)
        engine.place.mkdir()
        command = [sys.executable, str(HERE / "engine.py"), str(engine.place), json.dumps(engine.told)]
        with (engine.place / "log").open("w") as log:
            started[engine.place] = subprocess.Popen(
                command, env=ours | engine.environment, stdout=log, stderr=log, start_new_session=True
            )
        time.sleep(1.5)  # each looks how much memory the others have left
    deadline = time.monotonic() + timeout_s
    for place, process in started.items():
        try:
            status: object = process.wait(max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            status = "out of time"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (place / "status").write_text(str(status))


def _write_plugin(folder: Path) -> Path:
    """Make the plugin that notes what the online canary finds; return the folder that belongs on PYTHONPATH."""
    plugins = folder / "plugins"
    info = plugins / "conformance_ring-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-ring\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nconformance_ring = conformance_ring:plugin\n")
    shutil.copy(HERE / "plugin.py", plugins / "conformance_ring.py")
    return plugins
