"""Makes transformers engines to be ended: a process that has everything loaded, and forks one engine for each line read.

A line is JSON: `path` of the trace, `log`, and `way`, how the engine ends itself after `steps` steps; nothing for one that
somebody else ends. Its process id is printed. After each step, outside of the recorder, it appends to `log` the number of
steps whose result it has.
"""

import ctypes
import itertools
import json
import os
import signal
import sys
import threading
from typing import Any

from kvcanary.recorder.capture.recorder import prepare_kernels
from kvcanary.recorder.engines.transformers import attach
from transformers.generation.continuous_batching import continuous_api

from ..engines import tiny_models

WAYS = {
    "os_exit": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda: os.killpg(0, signal.SIGTERM),
}


def run(asked: dict[str, Any]) -> None:
    """Run one engine until it is ended, answer after answer."""
    os.setpgrp()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    attach(asked["path"], **asked.get("options", {}))
    recorded = continuous_api.ContinuousBatchProcessor._generation_step
    done = itertools.count(1)

    def step(*args: Any, **kwargs: Any) -> Any:
        result = recorded(*args, **kwargs)
        number = next(done)
        os.write(log, b"%d\n" % number)
        if number == asked.get("steps"):
            WAYS[asked["way"]]()
        return result

    continuous_api.ContinuousBatchProcessor._generation_step = step
    while True:
        tiny_models.generate(MODEL, max_new_tokens=40)


def main() -> None:
    """Fork one engine for each line."""
    prepare_kernels()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who end
    assert threading.active_count() == 1, "a forked process must not miss a thread"
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(json.loads(line))
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as error:  # noqa: BLE001  # a child must not come back into the loop
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)


MODEL = tiny_models.model("llama")

if __name__ == "__main__":
    main()
