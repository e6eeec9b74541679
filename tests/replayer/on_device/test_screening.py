"""Whatever the device is given, the CPU's code takes without an error: nothing contradicts itself behind the host's back."""

from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.state.events import read_known_event
from kvcanary.recorder.state.forward import UnusableEventError, read_forward
from kvcanary.recorder.state.tables import StateTables
from kvcanary.recorder.state.writes import KvChanges
from kvcanary.recorder.trace.reader import TraceBatch, TraceReader
from kvcanary.recorder.trace.schema import INT_LISTS
from kvcanary.replayer.executors.device.screening import screen
from kvcanary.replayer.run.out_of_range import beyond_table

from ..equality.histories import write_raw
from .raw import read_raw

DATA = Path(__file__).parents[3] / "data"
TRACES = ("clean_fork_dedup_evict.arrow", "sglang/clean_hybrid_h200.arrow")
WILD = (-1, -(1 << 63), 1 << 62, (1 << 63) - 1, 1 << 31, 5000)


@pytest.mark.parametrize("name", TRACES)
def test_what_is_given_to_the_device_is_sound(name: str, tmp_path: Path) -> None:
    header, _ = read_raw(DATA / name)
    rng = np.random.default_rng(7)
    taken = left = 0
    for round_ in range(4):
        _, events = read_raw(DATA / name)
        for event in events:
            if rng.random() < 0.15:
                columns = [column for column in event.ints if len(event.ints[column])]
                if columns:
                    _spoil(event, str(rng.choice(columns)), rng)
        trace = write_raw(tmp_path / f"{round_}.arrow", header, events)
        with TraceReader(trace) as reader:
            for batch in reader.stream():
                assert isinstance(batch, TraceBatch)
                screening = screen(batch, header, checks=True)
                for view in batch:
                    if not screening.for_device[view.index]:
                        left += 1
                        continue
                    taken += 1
                    _sound(view, header)
    assert taken > 100
    assert left > 10


def _spoil(event, column: str, rng: np.random.Generator) -> None:
    values = event.ints[column].copy()
    if rng.random() < 0.5:
        values[rng.integers(len(values))] = rng.choice(WILD)
    elif rng.random() < 0.5:
        values = values[:-1]
    else:
        values = np.append(values, values[-1])
    assert column in INT_LISTS
    event.ints[column] = values


def _sound(view, header) -> None:
    try:
        StateTables(header, backend="cpu").apply_changes(view)
        if view.kind == "forward":
            forward = read_forward(view, header)
            KvChanges(view, header, forward.runner)
            for group in header.groups:
                if group.runner == forward.runner:
                    table = header.tables[group.table]
                    assert not beyond_table(forward, (table.rows, table.width)).any()
        else:
            read_known_event(view, header.groups)
    except UnusableEventError as error:
        pytest.fail(f"event {view.number} ({view.kind}) was given to the device: {error}")
