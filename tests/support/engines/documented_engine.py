"""The toy engine of docs/guide/recording-your-engine.md as a subject for tests, and readers of what it recorded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..places import DOCS

DOCUMENT = DOCS / "guide" / "recording-your-engine.md"


def printed_code(name: str = "ToyEngine", document: Path = DOCUMENT) -> str:
    """Return the document's block of Python with this class in it."""
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if f"class {name}:" in block]
    return str(found)


def run_code(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


def definitions() -> dict[str, Any]:
    """Return `ToyEngine` and `start_recorder` without running anything."""
    return run_code(printed_code().split("\nengine = ToyEngine")[0])


def toy_engine(path: Path, wrap: Callable[[Any], Any] = lambda recorder: recorder, **options: Any) -> Any:
    """Return an engine that records to `path`; `wrap` may put something between it and its recorder."""
    names = definitions()
    recorder_class = names["Recorder"]
    names["Recorder"] = lambda *args, **kwargs: recorder_class(*args, **kwargs, **options)
    engine = names["ToyEngine"](lambda engine: wrap(names["start_recorder"](engine, path)))
    engine.make_input = ForwardInput
    return engine


def run_requests(engine: Any, before_step: Callable[[int], None] = lambda _: None) -> list[list[int]]:
    """Run a fixed load: requests that come and go, slots and rows that are used again; return their tokens."""
    rng = np.random.default_rng(5)
    waiting = [
        (number, rng.integers(1, 90, rng.integers(1, 20)).tolist(), int(rng.integers(1, 14))) for number in range(9)
    ]
    answers = {}
    for step in range(200):
        while waiting and len(engine.requests) < 3:
            number, prompt, new_tokens = waiting.pop(0)
            engine.add(100 + number, f"request-{number}", prompt, new_tokens)
        if not engine.requests:
            break
        for request in engine.requests.values():
            answers[request[0]] = request
        before_step(step)
        engine.step()
    return [request[1] for request in answers.values()]


def contents(path: Path) -> list[dict[str, Any]]:
    """Return every column of every event, without what differs from run to run."""
    found = []
    for event in read_trace(path):
        columns: dict[str, Any] = {name: event.scalar(name) for name in SCALARS if name != "time_ns"}
        columns |= {name: event.ints(name).tolist() for name in INT_LISTS}
        columns |= {name: event.bytes(name).tolist() for name in BYTE_LISTS}
        found.append(columns)
    return found


def judged(path: Path) -> Any:
    """Return the replay's summary."""
    return replay(path, settings=ReplaySettings(), report=None)


def a_forward(**changes: Any) -> ForwardInput:
    """Return a small prefill for the toy engine's shapes, with some fields changed."""
    fields: dict[str, Any] = {
        "mode": "extend",
        "req_pool_indices": [1],
        "request_ids": [1],
        "prefix_lens": [0],
        "extend_lens": [2],
        "input_ids": [5, 6],
        "positions": [0, 1],
        "out_cache_loc": ([1, 2],),
        "reads": (np.zeros((5, 64), np.int32),),
    }
    return ForwardInput(**{**fields, **changes})
