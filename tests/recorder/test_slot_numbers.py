"""Engines that use slot 0, or whose padding goes elsewhere: every slot that is not padding is verified."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.capture.slot_numbers import SlotNumbers
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.documented_engine import printed_code, run_code, run_requests

SETTINGS = [{}, {"executor": "stepwise"}, {"executor": "stepwise", "backend": "reference"}]


def record(path: Path, padding: str, *, flip: int | None = None, first: int = 0) -> None:
    """Run the guide's engine with slots from `first` on; flip a byte of a slot as soon as a forward is about to read it."""
    code = printed_code().replace("list(range(1, SLOTS))", f"list(range({first}, SLOTS - 1))")
    code = code.replace("num_slots=SLOTS, streams", f"num_slots=SLOTS, padding_slots={padding}, streams")
    code = code.split("\nengine = ToyEngine")[0]
    assert f"range({first}, SLOTS - 1)" in code
    assert f"padding_slots={padding}" in code
    names = run_code(code)
    engine = names["ToyEngine"](lambda engine: names["start_recorder"](engine, path))
    flipped: list[Any] = []

    def before_step(_: int) -> None:
        for row, request in engine.requests.items():
            if flip is not None and not flipped and flip in engine.req_to_token[row, : request[2]].tolist():
                flipped.append(flip)
                engine.pool["V"].view(np.uint8)[flip, 5] ^= 1

    run_requests(engine, before_step)
    engine.recorder.close()
    assert engine.recorder.stats().off == "closed"
    assert len(flipped) == (flip is not None)


@pytest.mark.parametrize("settings", SETTINGS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize("padding", ["()", "(128,)", "(0,)", "(0, 128)"])
def test_a_healthy_engine_is_clean(padding: str, settings: dict[str, Any], tmp_path: Path) -> None:
    record(tmp_path / "trace.arrow", padding, first=int("0" in padding))
    summary = replay(tmp_path / "trace.arrow", settings=ReplaySettings(**settings), report=None)
    assert (summary.violations, summary.findings, summary.losses) == (0, 0, [])
    assert summary.verified > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize(("padding", "slot"), [("()", 0), ("()", 1), ("(128,)", 0), ("(0, 128)", 1)])
def test_damage_to_a_real_slot_is_found(padding: str, slot: int, settings: dict[str, Any], tmp_path: Path) -> None:
    record(tmp_path / "trace.arrow", padding, flip=slot, first=int("0" in padding))
    summary = replay(tmp_path / "trace.arrow", settings=ReplaySettings(**settings), report=None)
    assert set(summary.violations_by_launch) == {"TAIL_V_FULL"}
    with TraceReader(tmp_path / "trace.arrow") as reader:
        (group,) = reader.header.groups
        shift = int("0" not in padding)
        assert (group.num_slots, group.padding_slots, group.slot_shift) == (129 + shift, (0,), shift)
        assert any("the engine's slot s - 1" in note for note in reader.header.notes) == bool(shift)
    assert summary.first_violation["slot"] == slot + shift


def group(name: str, padding: tuple[int, ...], **more: Any) -> PoolGroup:
    return PoolGroup(name=name, num_slots=8, padding_slots=padding, **more)


def header(*groups: PoolGroup) -> TraceHeader:
    return TraceHeader(groups=groups, tables=(StateTable(rows=2, width=8),), lut_lens=(8,))


def test_numbers() -> None:
    numbers = SlotNumbers(header(group("a", (3, 7))))
    slots = np.array([-2, -1, 0, 2, 3, 4, 7], np.int64)
    assert numbers.of_group(0, slots).tolist() == [-2, -1, 1, 3, 0, 5, 0]
    assert numbers.of_table(0, slots).tolist() == numbers.of_groups(np.zeros(7, np.int64), slots).tolist()
    assert numbers.runs(np.array([0, 0, 5]), np.array([0, 4, 4])).tolist() == [1, 5, 4]
    written = numbers.header(header(group("a", (3, 7))))
    assert not SlotNumbers(written).differ


def test_what_cannot_be_numbered_is_refused() -> None:
    with pytest.raises(ValueError, match="share a table"):
        SlotNumbers(header(group("a", ()), group("b", (0,))))
    with pytest.raises(ValueError, match="behind a full-to-SWA table"):
        SlotNumbers(header(group("a", (), kind="swa", window=2, lut=0)))


def test_a_trace_that_uses_slot_0_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.arrow", header(group("a", ()))):
        pass
    with pytest.raises(TraceError, match="padding_slots"):
        replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=None)
