"""Every byte that is captured is checked: a flip anywhere in it is found, whichever executor and backend replays."""

from pathlib import Path
from typing import Any

import pytest
from kvcanary.replayer.replay import ReplaySettings, replay

from .documented_engine import printed_code, run_code, run_requests


def captured_engine(path: Path, capture: int, **options: Any) -> Any:
    """Return the guide's engine, which captures so many of the 32 bytes of a token's K and V."""
    code = printed_code().replace("_bytes=16", f"_bytes={capture}").split("\nengine = ToyEngine")[0]
    assert code.count(f"_bytes={capture}") == 2
    names = run_code(code)
    recorder = names["Recorder"]
    names["Recorder"] = lambda *args, **kwargs: recorder(*args, **kwargs, **options)
    return names["ToyEngine"](lambda engine: names["start_recorder"](engine, path))


def run_with_flip(path: Path, capture: int, byte: int, **options: Any) -> int:
    """Flip one byte of a slot that the next forward reads, between two forwards; return the slot."""
    engine = captured_engine(path, capture, **options)
    flipped = []

    def before_step(step: int) -> None:
        if step == 6:
            row, request = next(iter(engine.requests.items()))
            flipped.append(int(engine.req_to_token[row, request[2] - 1]))
            engine.pool["K"].view("uint8")[flipped[0], byte] ^= 0x20

    run_requests(engine, before_step)
    engine.recorder.close()
    return flipped[0]


EXECUTORS = [{"executor": "interval"}, {"executor": "stepwise"}, {"executor": "stepwise", "backend": "reference"}]


@pytest.mark.parametrize("settings", EXECUTORS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize(("capture", "byte"), [(32, 0), (32, 20), (32, 31), (16, 15)])
def test_a_flip_of_any_captured_byte_is_found_by_default(
    capture: int, byte: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    slot = run_with_flip(tmp_path / "trace.arrow", capture, byte)
    summary = replay(tmp_path / "trace.arrow", settings=ReplaySettings(**settings), report=None)
    assert (summary.first_violation["forward"], summary.first_violation["slot"]) == (6, slot)
    assert set(summary.violations_by_launch) == {"TAIL_K_FULL"}


def test_the_published_canarys_partial_hash_is_still_to_be_had(tmp_path: Path) -> None:
    run_with_flip(tmp_path / "trace.arrow", 32, 20)
    partial = replay(tmp_path / "trace.arrow", settings=ReplaySettings(kv_hash="partial"), report=None)
    assert (partial.violations, partial.settings["kv_hash"]) == (0, "partial")
    whole = replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=None)
    assert whole.settings["kv_hash"] == "all"


def test_a_byte_behind_the_captured_ones_is_not_watched(tmp_path: Path) -> None:
    run_with_flip(tmp_path / "trace.arrow", 16, 16)
    assert replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=None).violations == 0
