"""Runs vLLM on the CPU, recorded once by the host's recorder and once as on a GPU, and compares the two traces.

    python tests/conformance/vllm/device_stand_in.py               # the setups with a draft model or a connector
    python tests/conformance/vllm/device_stand_in.py llama-eagle

The kernels that capture forwards run in Triton's interpreter, on the CPU's tensors. Exit status 1 if the traces differ in what
any forward of the target or of the draft was given, or if one does not replay clean.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DRAFTS = ("llama-eagle", "llama-eagle-preempt", "llama-eagle-async", "llama-draft-model")
LOADS = (
    "llama-loads",
    "llama-loads-beside",
    "llama-loads-fail",
    "llama-loads-async",
    "hybrid-loads",
    "llama-offloads-preempt",
)
SETUPS = (*DRAFTS, *LOADS, "llama-several", "llama-shared-storage", "hybrid-offloads")
COLUMNS = (
    *("req_pool_indices", "prefix_lens", "extend_lens", "input_ids", "positions", "truth_lens"),
    *("attention_seq_lens", "attention_query_lens"),
)


def stand_in() -> None:
    """Have this process's engine pass for one on a GPU."""
    import numpy as np
    import torch
    from kvcanary.kernels.capture import model_forward
    from kvcanary.recorder.engines.vllm import layout, recording

    model_forward.PROGRAMS, model_forward.TILE = 6, 64
    own = layout.VllmLayout.__init__

    def with_tensors(self: layout.VllmLayout, *args: object) -> None:
        own(self, *args)
        for source in self.kv.sources.values():  # what the CPU's attention packs is kept beside it, as arrays
            if isinstance(source.tensor, np.ndarray):
                object.__setattr__(source, "tensor", torch.from_numpy(source.tensor))

    layout.VllmLayout.__init__ = with_tensors
    torch.Tensor.is_pinned = lambda *_: True  # so that the kernels read it
    recording.on_gpu = lambda _: True


def run_engine(setup: str, folder: Path, *, device: bool) -> None:
    """Run one engine in this process."""
    sys.path.insert(0, str(HERE))
    from configurations import Run
    from engine import environment, generate, import_engine

    run = Run(setup=setup, fault="none", seed=1)
    os.environ.update(environment(run, folder) | {"KVCANARY_SWEEP_EVERY": "0"})
    import_engine()
    from kvcanary.recorder.process.settings import RecordingSettings

    RecordingSettings.new_sampling_seed = lambda _: None  # on devices no later layers are sampled
    if device:
        stand_in()
    generate(run, folder)


def forwards(folder: Path, *, drafts: bool) -> list[dict[str, Any]]:
    """Return what each forward with tokens was given."""
    from kvcanary.recorder.trace.reader import read_trace

    (path,) = (folder / "traces").glob("*.arrow")
    found = []
    for event in read_trace(path):
        if event.kind == "forward" and len(event.ints("extend_lens")):
            row = {name: event.ints(name).tolist() for name in COLUMNS}
            row |= {name: event.scalar(name) for name in ("runner", "mode", "attention_watched")}
            slots = event.ints("out_cache_loc").reshape(-1, sum(row["extend_lens"]))
            row["out_cache_loc"] = (slots[[event.scalar("runner")]] if drafts else slots).tolist()
            found.append(row | {"kv_bytes": event.bytes("kv_bytes").tobytes()})
    return found


def timed(setup: str) -> bool:
    """Whether it depends on when jobs end what is loaded, or on the order in which a set names those of one step."""
    return any(word in setup for word in ("offloads", "several", "beside"))


def hashed(folder: Path) -> tuple[int, int]:
    """Return of how many pages that were copied both ends are known, and of how many they are the same."""
    from kvcanary.recorder.trace.reader import read_trace

    (path,) = (folder / "traces").glob("*.arrow")
    pairs = [
        pair
        for event in read_trace(path)
        if event.kind == "kv_copy" and event.scalar("note") in ("load-back", "stored")
        for pair in zip(event.ints("copy_src_hash").tolist(), event.ints("copy_dst_hash").tolist(), strict=True)
    ]
    return sum(any(pair) for pair in pairs), sum(pair[0] == pair[1] != 0 for pair in pairs)


def others(folder: Path) -> list[tuple[object, ...]]:
    """Return what was said of loads and copies, but for the bytes that landed, which nobody reads on a device."""
    from kvcanary.recorder.trace.reader import read_trace

    (path,) = (folder / "traces").glob("*.arrow")
    scalars = ("status", "mode", "room", "peer", "note")  # ids of requests are made of names that each run draws
    columns = ("slot_start", "slot_count", "prefix_lens", "copy_src", "copy_dst")
    return [
        (event.kind, *map(event.scalar, scalars), *(event.ints(name).tolist() for name in columns))
        for event in read_trace(path)
        if event.kind in ("transfer", "kv_copy")
    ]


def compared(setup: str, folder: Path) -> list[str]:
    """Run a setup both ways; return what is wrong."""
    from kvcanary.replayer.run.replay import ReplaySettings, replay

    wrong, found, said = [], [], []
    for how in ("host", "device"):
        place = folder / f"{setup}-{how}"
        place.mkdir()
        with (place / "log").open("w") as log:
            command = [sys.executable, __file__, "--engine", setup, str(place), how]
            env = os.environ | ({"TRITON_INTERPRET": "1"} if how == "device" else {})
            ended = subprocess.run(command, stdout=log, stderr=log, env=env, check=False).returncode
        if ended:
            return [f"the engine ended with {ended}: {(place / 'log').read_text()[-400:]}"]
        (path,) = (place / "traces").glob("*.arrow")
        summary = replay(path, settings=ReplaySettings(), report=None)
        found.append(forwards(place, drafts=setup in DRAFTS))
        said.append(others(place))
        if summary.verdict.value != "clean":
            wrong.append(f"{how}: {summary.verdict.value}, {summary.findings_by_kind}")
        if how == "device" and any("waits" in note for note in summary.header.notes):
            wrong.append("it waits for the device")
    host, device = found
    if (place := folder / f"{setup}-host" / "tokens.json").read_bytes() != (
        folder / f"{setup}-device" / "tokens.json"
    ).read_bytes():
        wrong.append(f"other tokens than in {place}")
    if said[0] != said[1] and not timed(setup):
        apart = next((pair for pair in zip(*said, strict=False) if pair[0] != pair[1]), list(map(len, said)))
        wrong.append(f"other loads and copies: {apart}"[:600])
    if len(host) != len(device):
        wrong.append(f"{len(device)} forwards on the device, {len(host)} on the host")
    for number, (mine, other) in enumerate(zip(device, host, strict=False)):
        differ = [name for name, value in mine.items() if value != other[name]]
        if differ:
            wrong.append(f"forward {number}: {differ}: {[(mine[name], other[name]) for name in differ][:2]}"[:600])
    drafts = sum(row["runner"] == 1 for row in device)
    if "offloads" in setup:
        known, same = hashed(folder / f"{setup}-device")
        wrong += [] if known and same else [f"{known} ends are known on the device, {same} alike"]
    counts = f"{len(device)} forwards, {drafts} of a draft, {len(said[1])} loads and copies"
    print(f"{setup}: {counts}, {'WRONG' if wrong else 'the same on both'}", flush=True)
    return wrong


def main() -> int:
    if sys.argv[1:2] == ["--engine"]:
        run_engine(sys.argv[2], Path(sys.argv[3]), device=sys.argv[4] == "device")
        return 0
    found = False
    with tempfile.TemporaryDirectory(prefix="device-stand-in-") as folder:
        for setup in sys.argv[1:] or SETUPS:
            for said in compared(setup, Path(folder))[:5]:
                found = True
                print("   ", said)
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
