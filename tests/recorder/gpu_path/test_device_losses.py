"""Whatever does not fit, what the trace still tells of is right: its tables are the engine's, and losses are counted."""

import numpy as np
import pytest
from kvcanary.recorder.capture.device import capture

from .two_recorders import Engine, follow, random_forward


@pytest.mark.parametrize("swa", [False, True])
def test_everything_is_told(swa, tmp_path):
    rng = np.random.default_rng(3)
    engine = Engine(tmp_path, rng, swa=swa)
    for _ in range(8):
        random_forward(engine, rng)
    _, device = engine.close()
    assert follow(engine, device) == (list(range(8)), 0, 0)


@pytest.mark.parametrize("swa", [False, True])
def test_changes_that_do_not_fit_are_told_later(swa, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "TABLE_TILES_FEW", 1)
    monkeypatch.setattr(capture, "TABLE_TILES", 3)
    monkeypatch.setattr(capture, "LUT_CHANGES", 24)
    monkeypatch.setattr(capture, "KV_CHANGES", 1)
    rng = np.random.default_rng(4)
    engine = Engine(tmp_path, rng, swa=swa)
    for _ in range(14):
        random_forward(engine, rng)
    _, device = engine.close()
    told, lost, unknown = follow(engine, device)
    assert 3 < len(told) < 14
    assert (lost, unknown) == (14 - len(told), 0)


def test_no_room_for_another_forward(tmp_path):
    """The first frame fills the buffer until it is read; what is recorded after a loss is recorded anew."""
    rng = np.random.default_rng(5)
    engine = Engine(tmp_path, rng, frame_bytes=1 << 14)
    gate = engine.hold_frames()
    for _ in range(6):
        random_forward(engine, rng)
    gate.set()
    engine.device.drain()
    for _ in range(6):
        random_forward(engine, rng)
        engine.device.drain()
    _, device = engine.close()
    told, lost, unknown = follow(engine, device)
    assert unknown > 0
    assert set(range(7, 12)) <= set(told)
    assert len(told) + lost + unknown >= 12


def test_a_writer_that_takes_no_more(tmp_path):
    rng = np.random.default_rng(6)
    engine = Engine(tmp_path, rng)
    refuse = engine.refuse_events()
    for i in range(12):
        refuse[0] = 4 <= i < 8
        random_forward(engine, rng)
        engine.device.drain()
    _, device = engine.close()
    told, lost, unknown = follow(engine, device)
    assert told == [0, 1, 2, 3, *range(told[4], 12)]
    assert told[4] in (8, 9)
    assert unknown >= 1
    assert lost == 0  # an unknown loss stands for them, and the recorder knows how many
    assert engine.device.stats().dropped_events == told[4] - 4
