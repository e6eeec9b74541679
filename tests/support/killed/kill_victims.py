"""Makes engines to be killed: a process that has everything loaded, and forks one simulated engine for each line read.

A line is JSON: `path`, `seed`, `log` and the writer's `options`. The engine's process id is printed. It runs for ever
and appends a line to `log` for each batch that is in the file: `wall-clock ns, time_ns of its last event, its events,
ns that the write took`. The line is written after the batch, so that a kill in between leaves a batch more than lines.
Beside it, `finished.log` gets a line for each step that is over: the number of the last forward whose outcome is known.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import kvcanary.recorder.state.keyframe  # noqa: F401  # loaded before the forks
from kvcanary.recorder.capture.recorder import prepare_kernels
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.state.apply import RecordedState
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.lab.configurations import CONFIGURATIONS


def warm_up() -> None:
    """Load the compiled kernels; no thread is started, so that a fork has what it needs and nothing else."""
    prepare_kernels()
    RecordedState(TraceHeader(groups=(PoolGroup(name="full", num_slots=2),), tables=(StateTable(rows=2, width=2),)))


def run(path: Path, seed: int, log_path: str, options: dict[str, int]) -> None:
    """Run one engine until somebody kills it, workload after workload."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    configuration = CONFIGURATIONS[("mha", "swa", "eagle", "host")[seed % 4]]

    def endless():
        for number in itertools.count():
            yield from configuration.requests(seed + 1000 * number)

    with SimulatedEngine(configuration.engine_config(seed), endless(), path, **options) as engine:
        file = engine.recorder.outbox.writer.file
        write = file.write

        def logged(events) -> None:
            begin = time.perf_counter_ns()
            write(events)
            took = time.perf_counter_ns() - begin
            os.write(log, b"%d %d %d %d\n" % (time.time_ns(), events[-1].time_ns, len(events), took))

        file.write = logged
        finished = os.open(f"{Path(log_path).parent}/finished.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        while engine.step():
            os.write(finished, b"%d\n" % (engine.recorder.next_forward - 1))
            time.sleep(0.002)  # as if a model ran; the other side of the machine has work to do, too


def main() -> None:
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who are killed
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        code = 1
        try:
            run(Path(asked["path"]), asked["seed"], asked["log"], asked["options"])
        except BaseException as error:  # noqa: BLE001  # a child must not come back into the loop
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)


if __name__ == "__main__":
    main()
