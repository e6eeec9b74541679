"""What attention got, held against prefix, extend and block table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.capture.forward_input import AttentionInput, OutputRead, TableRead
from kvcanary.recorder.writing.outbox import Outbox
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .scene import Part, Scene, told


def _decode(scene: Scene, prefix: int, slot: int, *, padding: tuple[int, ...] = (), **attention: Any) -> int:
    part = Part(request=7, row=1, prefix=prefix, slots=(slot,))
    return scene.forward(part, mode="decode", padding=padding, attention=AttentionInput(**attention))


def _read(slots: list[int], start: int = 0) -> TableRead:
    return TableRead(starts=[start], counts=[len(slots)], slots=slots)


@pytest.mark.parametrize(
    ("seq_len", "query_len", "detail"),
    [
        (1, -1, "attention read 1 tokens, the request has 3 cached and 1 new"),
        (5, 1, "attention read 5 tokens"),
        (-1, 2, "attention computed 2 query tokens"),
    ],
)
def test_a_length_that_is_not_the_requests_is_found(scene: Scene, seq_len: int, query_len: int, detail: str) -> None:
    scene.start(7, 1, [3, 4, 5])
    _decode(scene, 3, 6, seq_lens=[4], query_lens=[1])
    found = _decode(scene, 4, 8, seq_lens=[5], query_lens=[1])
    assert found
    found = scene.forward(
        Part(request=7, row=1, prefix=3, slots=(9,)),
        mode="decode",
        attention=AttentionInput(seq_lens=[seq_len], query_lens=[query_len]),
    )
    rows = scene.judge("attention_lens")
    assert told(rows) == [(3, 7, -1, 1, json.dumps([found]))]
    assert detail in rows[0]["detail"]


def test_padding_and_lengths_that_nobody_observed_are_silent(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    _decode(scene, 3, 6, padding=(0,), seq_lens=[4, 99], query_lens=[-1, 17])
    _decode(scene, 4, 8, seq_lens=[-1])
    assert scene.judge("attention_lens") == []


def test_a_slot_that_is_not_the_tables_is_found_once_while_it_lasts(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    other = scene.start(8, 2, [10, 11])
    found = _decode(scene, 3, 6, slots=(_read([3, 11, 5, 6]),))
    _decode(scene, 4, 8, slots=(_read([3, 11, 5, 6, 8]),))
    _decode(scene, 5, 9, slots=(_read([3, 4, 5, 6, 8, 9]),))
    again = _decode(scene, 6, 12, slots=(_read([3, 11, 5, 6, 8, 9, 13]),))
    rows = scene.judge("attention_slots")
    assert [(r["forward"], r["slot"], r["position"], r["count"]) for r in rows] == [(2, 11, 1, 1), (5, 11, 1, 2)]
    assert rows[0]["detail"] == "attention got slot 11 of request 8, the block table has 4"
    assert json.loads(rows[0]["evidence"])[-1] == found
    assert other in json.loads(rows[0]["evidence"])
    assert json.loads(rows[1]["evidence"])[-1] == again


def test_a_slot_that_the_forward_itself_writes_is_held_too(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    _decode(scene, 3, 6, slots=(_read([3, 4, 5, 60]),))
    _decode(scene, 4, 7, slots=(_read([1000, 4, 5, 6, 7]),))
    rows = scene.judge("attention_slots")
    assert [row["detail"] for row in rows] == [
        "attention got slot 60, this forward writes 6",
        "attention got slot 1000, which the pool does not have, the block table has 3",
    ]


def test_sliding_slots_are_held_through_their_table(make_scene) -> None:
    scene = make_scene(window=4, told="")
    scene.lut[[3, 4, 5, 6]] = [23, 24, 25, 26]
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5)))
    full, swa = _read([3, 4, 5, 6]), _read([23, 24, 33, 26])
    scene.forward(Part(request=7, row=1, prefix=3, slots=(6,)), attention=AttentionInput(slots=(full, swa)))
    rows = scene.judge("attention_slots")
    assert [(row["group"], row["slot"], row["position"]) for row in rows] == [(1, 33, 2)]


def test_after_a_gap_unknown_entries_are_not_judged(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    scene.lose()
    _decode(scene, 3, 6, slots=(_read([3, 4, 5, 6]),))
    assert scene.judge("attention_slots") == []


def test_the_compiled_pass_finds_the_same(tmp_path: Path, make_scene) -> None:
    """A long trace, so that the pass is tried; every 97th forward got something wrong."""
    scene = make_scene(told="")
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    for number in range(1300):
        seq_len, slot = 3, 3
        if number % 97 == 96:
            seq_len += number % 2 * 2 - 1
            slot = 9
        scene.table[1, 1:] = 0
        scene.forward(
            Part(request=7, row=1, prefix=1, slots=(4, 5)),
            attention=AttentionInput(seq_lens=[seq_len], query_lens=[2], slots=(_read([slot, 4, 5]),)),
        )
    scene.recorder.close()
    ways = {executor: _findings(scene.path, executor, tmp_path) for executor in ("stepwise", "interval")}
    assert ways["interval"] == ways["stepwise"]
    assert len([row for row in ways["interval"] if row[0] == "attention_lens"]) == 13
    assert len([row for row in ways["interval"] if row[0] == "attention_slots"]) == 13


def _findings(path: Path, executor: str, folder: Path) -> list[tuple]:
    import pyarrow.parquet as pq

    report = folder / executor
    report.mkdir()
    replay(path, settings=ReplaySettings(executor=executor), report=report)
    rows = pq.read_table(report / "findings.parquet").to_pylist()
    return [(row["kind"], row["forward"], row["slot"], row["position"], row["detail"]) for row in rows]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("", []),
        ("attention_seq_lens", [1, 2]),
        ("attention_group", [0]),
        ("attention_request", [5]),
        ("attention_count", [2]),
        ("attention_start", [-1]),
        ("attention_slots", [1, 2, 3]),
    ],
)
def test_columns_that_contradict_one_another_make_the_event_unusable(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, column: str, values: list[int]
) -> None:
    put = Outbox.put

    def bent(self: Outbox, event: Any) -> bool:
        if event.kind == "forward" and "attention_seq_lens" in event.ints:
            event.ints["attention_group"] = np.array([1 if column == "attention_group" else 0])
            event.ints |= {f"attention_{n}": np.array([0]) for n in ("request", "start")}
            event.ints |= {f"attention_{n}": np.array([1]) for n in ("count", "slots")}
            if column:
                event.ints[column] = np.array(values) + (column == "attention_group")
        return put(self, event)

    monkeypatch.setattr(Outbox, "put", bent)
    scene.start(7, 1, [3, 4, 5])
    _decode(scene, 3, 6, seq_lens=[4])
    summary, rows = scene.report("attention_lens", "attention_slots")
    assert bool(summary.doubts) == bool(column)
    assert bool(rows) != bool(column)


def test_an_output_that_nothing_explains_is_found(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    _decode(scene, 3, 6, outputs_compared=2)
    outputs = [OutputRead(0, layer, 0, 4, 0, -1) for layer in (0, 5)]  # of which the first stands for both
    found = _decode(scene, 4, 8, outputs=outputs, outputs_compared=2)
    rows = scene.judge("attention_output")
    assert told(rows) == [(2, 7, -1, 1, json.dumps([found]))]
    assert "what attention gave in layer 0 for the token at position 4 is no weighted mean" in rows[0]["detail"]
