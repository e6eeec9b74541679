"""Real SGLang servers on the CPU, ended in every way; every token that a client has got must be in the trace.

    .venv-sglang/bin/python tests/conformance/sglang/endings.py              # each way once
    .venv-sglang/bin/python tests/conformance/sglang/endings.py --only sigkill_engine --rounds 20

Clients stream tokens while the server is ended. What a client got, the host had; so the trace, as it lies there, must
hold a sampled token for each. A trace that was closed in time is whole; another is read with its tail, and
`kvcanary recover` must make a whole file of it that replays without a violation.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from engine import CPU_ENGINE, ENVIRONMENT, MODELS

START_S = 500
END_S = 60
CLIENTS = 3


@dataclass
class Server:
    """A server, its clients, and how many tokens each request's client has got."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    got: dict[str, int] = field(default_factory=dict)
    over: bool = False

    def engine(self) -> psutil.Process:
        """Return the process that runs the model: the one that writes a trace."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(one.path.endswith(".arrow") for one in child.open_files()):
                    return child
        raise SystemExit("no process of the server writes a trace")


def to_server(number: int) -> Callable[[Server], None]:
    """Send a signal to the server's main process."""
    return lambda server: os.kill(server.process.pid, number)


def to_group(*numbers: int) -> Callable[[Server], None]:
    """Send signals to the process group, as a terminal or a service manager does."""

    def end(server: Server) -> None:
        for number in numbers:
            os.killpg(server.process.pid, number)
            time.sleep(0.3)

    return end


def to_engine(number: int) -> Callable[[Server], None]:
    """Send a signal to the process that runs the model; SIGABRT and SIGSEGV end it as abort() and a bad pointer do."""
    return lambda server: server.engine().send_signal(number)


def container_stopped(server: Server) -> None:
    """Do what `docker stop -t 2` does: SIGTERM to the first process, then SIGKILL to all."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(server.process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(2)
    for one in [psutil.Process(server.process.pid), *family] if server.process.returncode is None else family:
        with contextlib.suppress(psutil.Error):
            one.kill()


def engine_raises(server: Server) -> None:
    """Have the engine fail on a request: a token that the model does not have."""
    with contextlib.suppress(OSError, ValueError):
        generate(server, "raises", 4, input_ids=[1, 2, -(10**6)])


WAYS: dict[str, Callable[[Server], None]] = {
    "ctrl_c": to_group(signal.SIGINT),
    "ctrl_c_twice": to_group(signal.SIGINT, signal.SIGINT),
    "sigterm_server": to_server(signal.SIGTERM),
    "sigterm_group": to_group(signal.SIGTERM),
    "container_stopped": container_stopped,
    "sigkill_server": to_server(signal.SIGKILL),
    "sigkill_group": to_group(signal.SIGKILL),
    "sigkill_engine": to_engine(signal.SIGKILL),
    "abort_engine": to_engine(signal.SIGABRT),
    "segfault_engine": to_engine(signal.SIGSEGV),
    "engine_raises": engine_raises,
}


def start(folder: Path, settings: dict[str, str], launcher: list[str]) -> Server:
    """Start a server by a launcher's command and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in CPU_ENGINE.items() if value is not True]
    options += [f"--{name.replace('_', '-')}" for name, value in CPU_ENGINE.items() if value is True]
    command = [sys.executable, *launcher, f"--model-path={MODELS / 'llama'}", *options]
    environ = {**os.environ, **ENVIRONMENT, "KVCANARY_TRACE": str(folder / "traces"), **settings}
    del environ["SGLANG_STANDIN_CANARY"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host=127.0.0.1", f"--port={port}"],
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Server(process, port, folder)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if generate(server, "warm-up", 2) == 2:
                return server
        time.sleep(0.5)
    stop(server)
    raise SystemExit(f"the server did not start: {(folder / 'server.log').read_text()[-3000:]}")


def generate(server: Server, name: str, tokens: int, input_ids: list[int] | None = None) -> int:
    """Stream one answer; what came is in `server.got` at any time."""
    dice = random.Random(name)
    asked = {
        "input_ids": input_ids or [dice.randrange(1, 90) for _ in range(dice.randrange(4, 60))],
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        "rid": name,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/generate",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                server.got[name] = json.loads(line[6:])["meta_info"]["completion_tokens"]
    return server.got.get(name, 0)


def load(server: Server, client: int) -> None:
    """Ask for one answer after another until the server is gone."""
    number = 0
    while not server.over:
        number += 1
        try:
            generate(server, f"client{client}-{number}", 5 + 7 * number % 40)
        except (OSError, ValueError):
            time.sleep(0.05)


def stop(server: Server) -> None:
    """Wait for the end; what still runs then is ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    time.sleep(1)


def sampled(path: Path) -> tuple[dict[str, int], list[str]]:
    """Return how many tokens a trace says that each request got, and how the trace ends."""
    from kvcanary.recorder.trace.batch import TraceGap
    from kvcanary.recorder.trace.reader import TraceReader

    names: dict[int, str] = {}
    batches: dict[int, list[int]] = {}
    counts: dict[str, int] = {}
    ends: list[str] = []
    with TraceReader(path) as reader:
        for item in reader.stream():
            if isinstance(item, TraceGap):
                ends.append(item.reason)
                continue
            for view in item:
                if view.kind == "request":
                    names[view.scalar("request_id")] = view.scalar("name")
                if view.kind == "forward":
                    batches[view.scalar("forward")] = view.ints("request_ids").tolist()
                if view.kind in ("forward", "sample"):
                    for request, count in zip(
                        batches[view.scalar("forward")], view.ints("sampled_lens").tolist(), strict=False
                    ):
                        name = names.get(request, "?")
                        counts[name] = counts.get(name, 0) + count
    return counts, ends


def run(way: str, seed: int, folder: Path, settings: dict[str, str], launcher: list[str]) -> str:
    """Run one server to its end; return what became of its trace, or raise where a token is missing."""
    dice = random.Random(f"{way}{seed}")
    server = start(folder, settings, launcher)
    clients = [threading.Thread(target=load, args=(server, n), daemon=True) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(1 + 3 * dice.random())
    WAYS[way](server)
    stop(server)
    server.over = True
    for client in clients:
        client.join(10)
    (path,) = (folder / "traces").glob("*.arrow")
    counts, ends = sampled(path)
    short = {name: (got, counts.get(name, 0)) for name, got in server.got.items() if counts.get(name, 0) < got}
    if short:
        raise SystemExit(f"{way}: tokens that a client got are not in the trace (got, recorded): {short}; {ends}")
    state = "whole" if not ends else "cut"
    if ends:
        subprocess.run([sys.executable, "-m", "kvcanary", "recover", str(path)], check=True, capture_output=True)
    replay = "from kvcanary.cli import replay_main; replay_main()"
    replayed = subprocess.run(
        [sys.executable, "-c", replay, "--no-report", str(folder / "traces")], capture_output=True, text=True
    )
    if replayed.returncode not in (0, 125):
        raise SystemExit(f"{way}: {replayed.returncode}: {replayed.stdout[-2000:]}{replayed.stderr[-2000:]}")
    tokens = sum(server.got.values())
    return f"{way:18} {state:6} {tokens:5} tokens of {len(server.got):3} requests, all recorded   {' '.join(ends)}"


def main() -> None:
    """Run the ways asked for and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(WAYS), help="ways, with commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help="start it by `sglang serve`")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, KVCANARY_...")
    asked = parser.parse_args()
    settings = dict(one.split("=", 1) for one in asked.set)
    serve = [str(Path(sys.executable).with_name("sglang")), "serve"]
    launcher = serve if asked.serve else ["-m", "sglang.launch_server"]
    for way in asked.only.split(","):
        for number in range(asked.rounds):
            folder = Path(tempfile.mkdtemp(prefix=f"{way}-"))  # stays where a run fails
            (folder / "traces").mkdir()
            print(run(way, number, folder, settings, launcher), flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
