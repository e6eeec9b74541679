"""Layers behind the first: bytes that nobody wrote, and values that no model writes, in every way of replaying."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture.layers import NARROW
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.kv_tensor import KvTensor
from kvcanary.recorder.capture.privacy import Privacy
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.both_ways import check

LAYERS, SLOTS, VALUES = 3, 32, 16
LATE = 2


class Engine:
    """Requests of one row each; `kv[half]` `[layers, slots, values] float32`. Of layer 0 the first 16 bytes are hashed."""

    def __init__(self, path: Path, *, narrow: str = "", **options: Any) -> None:
        """With a type of one byte, `narrow`, `kv` holds its bits."""
        self.path = path
        self.kv: list[Any] = [np.zeros((LAYERS, SLOTS, VALUES), np.uint8 if narrow else np.float32) for _ in "KV"]
        stored = [torch.from_numpy(kv).view(getattr(torch, narrow)) for kv in self.kv] if narrow else self.kv
        every = [KvTensor(tensor=tuple(kv), axes="slot value") for kv in stored]
        first = [KvTensor(tensor=kv[0], axes="slot value") for kv in stored]
        streams = [source.stream(half) for half, source in zip("KV", first, strict=True)]
        layers = tuple(range(LAYERS))
        streams += [
            source.sampling_stream(half, layers=layers, seed=5) for half, source in zip("KV", every, strict=True)
        ]
        group = PoolGroup(name="full", num_slots=SLOTS, streams=tuple(streams), num_layers=LAYERS)
        header = TraceHeader(groups=(group,), tables=(StateTable(rows=4, width=SLOTS),))
        sources = {(0, number): source for number, source in enumerate(first + every)}
        self.recorder = Recorder(path, header, kv_sources=sources, **options)
        self.table = np.zeros((4, SLOTS), np.int32)
        self.random = np.random.default_rng(7)

    def forward(
        self, *parts: tuple[int, int, list[int]], then: Callable[[], object] = lambda: None, token: int = 0
    ) -> None:
        """Run a forward; each part is a row, its prefix, its new slots. `then` happens before the forward's end; all are of a `token`."""
        slots = np.array([slot for _, _, mine in parts for slot in mine], np.int64)
        lens = [len(mine) for _, _, mine in parts]
        positions = np.concatenate([np.arange(p, p + n) for (_, p, _), n in zip(parts, lens, strict=True)])
        self.recorder.before_forward(
            ForwardInput(
                mode="decode" if max(lens) == 1 else "extend",
                req_pool_indices=[row for row, _, _ in parts],
                request_ids=[70 + row for row, _, _ in parts],
                prefix_lens=[prefix for _, prefix, _ in parts],
                extend_lens=lens,
                input_ids=np.full(slots.size, token) if token else positions + 100,
                positions=positions,
                out_cache_loc=(slots,),
                reads=(self.table,),
            )
        )
        for kv in self.kv:
            shape = LAYERS, slots.size, VALUES
            kv[:, slots] = (
                self.random.integers(1, 99, shape) if kv.dtype == np.uint8 else self.random.normal(size=shape)
            )
        for row, prefix, mine in parts:
            self.table[row, prefix : prefix + len(mine)] = mine
        then()
        self.recorder.after_forward()

    def prefill(self) -> "Engine":
        self.forward((1, 0, list(range(1, 13))), (2, 0, list(range(13, 17))))
        return self


def decode(engine: Engine, at: int = 0) -> None:
    engine.forward((1, 12 + at, [20 + at]), (2, 4 + at, [25 + at]))


def change(engine: Engine, layer: int = LATE) -> None:
    """Negate K of a layer in all slots of request 1."""
    engine.kv[0][layer, 1:13] *= -1


def found(engine: Engine, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the findings of every way of replaying, which are the same; there are no violations."""
    assert not engine.recorder.off
    engine.recorder.close()
    (one,) = check([engine.path], tmp_path, incidents=False)
    assert one.summary.violations == 0
    table = one.table("findings")
    return [] if table is None else table.to_pylist()


def test_a_change_in_a_late_layer_is_found_where_it_is_read(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow").prefill()
    decode(engine)
    change(engine)
    decode(engine, 1)
    decode(engine, 2)
    (row,) = found(engine, tmp_path)
    assert (row["kind"], row["cause"], row["forward"], row["request_id"]) == ("layer_changed", "changed_bytes", 2, 71)
    assert row["count"] == 4 and f"of K in layer {LATE} are not those" in row["detail"]  # one slot in three


def test_what_the_canary_sees_itself_is_its_own(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow").prefill()
    for layer in range(LAYERS):
        change(engine, layer)
    decode(engine)
    engine.recorder.close()
    summary = replay(engine.path, settings=ReplaySettings(), report=None)
    assert summary.violations and not summary.findings


@pytest.mark.parametrize("kv_hash", ["none", "partial"])
def test_the_canarys_hash_does_not_ask_for_it(kv_hash: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow").prefill()
    change(engine)
    decode(engine)
    engine.recorder.close()
    summary = replay(engine.path, settings=ReplaySettings(kv_hash=kv_hash), report=None)
    assert (summary.violations, summary.findings_by_kind) == (0, {"layer_changed": 1})


def test_a_copied_slot_shows_other_bytes_and_nothing_is_said(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow").prefill()
    engine.forward((3, 0, [27, 28, 29, 30]))
    for kv in engine.kv:
        kv[:, 27:31] = kv[:, 13:17]
    engine.recorder.kv_copy(group=0, src=[13], dst=[27], count=[4])
    engine.table[2, :4] = range(27, 31)
    decode(engine)
    assert found(engine, tmp_path) == []


def test_lost_slots_say_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow").prefill()
    engine.recorder.lost("on purpose")
    change(engine)
    decode(engine)
    engine.recorder.close()
    assert not replay(engine.path, settings=ReplaySettings(), report=None).findings


@pytest.mark.parametrize("value,cause", [(np.nan, "nan"), (-np.inf, "infinite")])
def test_the_first_bad_value_of_a_request_is_named(value: float, cause: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow")

    def spoil() -> None:
        engine.kv[1][1, 15:17, 3] = value
        engine.kv[0][LATE, 14:17, 0] = value

    engine.forward((1, 0, list(range(1, 13))), (2, 0, list(range(13, 17))), then=spoil)
    engine.forward((1, 12, [20]), (2, 4, [25]), then=lambda: engine.kv[0][1:, 25].fill(value))  # and what follows
    decode(engine, 1)
    engine.forward((1, 14, [22]), (2, 6, [27]), then=lambda: engine.kv[0][1:, 27].fill(value))
    first, again = found(engine, tmp_path)
    assert (first["kind"], first["cause"], first["forward"], first["request_id"]) == ("bad_values", cause, 0, 72)
    assert (first["position"], first["slot"]) == (2, 15)
    assert first["detail"].endswith(" in 5 rows of K or V written in prefill, first in V of layer 1")
    assert again["forward"] == 3 and again["detail"].endswith(
        "2 rows of K or V written in decode, first in K of layer 1"
    )


@pytest.mark.parametrize(
    ("first", "said"), [(0, "2 rows of K or V written are"), (LATE, "one row of K or V written is")]
)
def test_a_row_of_zeros_is_found_once_the_layer_is_known(tmp_path: Path, first: int, said: str) -> None:
    engine = Engine(tmp_path / "t.arrow")
    for _ in range(6):  # 96 rows a layer
        engine.prefill()
    engine.forward((3, 0, [1, 2, 3]), then=lambda: engine.kv[1][first:, 1:3].fill(0))  # at position 0, and behind it
    (row,) = found(engine, tmp_path)
    assert (row["cause"], row["position"], row["slot"]) == ("zeros", 1, 2)
    assert row["detail"].startswith(f"{said} all zeros")
    assert row["detail"].endswith(f"in prefill, first in V of layer {first or 1}")


@pytest.mark.parametrize(("layer", "behind"), [(0, False), (1, True), (2, False)])
def test_zeros_in_all_layers_behind_the_first_are_said_to_be(layer: int, behind: bool, tmp_path: Path) -> None:
    """Where the first layer holds zeros as well, the whole token may not have come there."""
    engine = Engine(tmp_path / "t.arrow")
    for _ in range(6):
        engine.prefill()
    engine.forward((3, 0, [1, 2, 3]), then=lambda: [kv[layer:, 2].fill(0) for kv in engine.kv])
    (row,) = found(engine, tmp_path)
    assert row["detail"].endswith("in all layers behind the first") is behind


@pytest.mark.parametrize("token,layer,rows", [(7, 0, 0), (7, 1, 8), (0, 0, 8)], ids=["padding", "a layer", "a prompt"])
def test_a_prompt_that_begins_with_an_embedding_of_zeros(token: int, layer: int, rows: int, tmp_path: Path) -> None:
    """All layers of its first tokens are zeros; where the first layer is not, or tokens are others, it was not written."""
    engine = Engine(tmp_path / "t.arrow")
    for _ in range(6):
        engine.prefill()
    engine.forward((3, 0, [1, 2, 3]), then=lambda: [kv[layer:, 1:4].fill(0) for kv in engine.kv], token=token)
    said = [row["detail"].split(" ")[0] for row in found(engine, tmp_path)]
    assert said == ([str(rows)] if rows else [])


@pytest.mark.parametrize("narrow", sorted(NARROW))
@pytest.mark.parametrize("layer,rows", [(0, 0), (1, 8)], ids=["all layers", "not the first one"])
def test_a_token_whose_values_are_all_too_small_for_one_byte(
    layer: int, rows: int, narrow: str, tmp_path: Path
) -> None:
    engine = Engine(tmp_path / "t.arrow", narrow=narrow)
    for _ in range(6):
        engine.prefill()
    engine.forward((3, 0, [1, 2, 3]), then=lambda: [kv[layer:, 1:4].fill(0) for kv in engine.kv])
    said = [row["detail"].split(" ")[0] for row in found(engine, tmp_path)]
    assert said == ([str(rows)] if rows else [])


@pytest.mark.parametrize("narrow", ["", *sorted(NARROW)])
def test_rows_at_the_end_of_what_8_bits_hold_are_found(narrow: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow", narrow=narrow)
    largest = torch.finfo(getattr(torch, narrow or "float32")).max
    ends = torch.tensor([largest, -largest, 0.0, largest] * 4).to(getattr(torch, narrow or "float32"))
    row = ends.view(torch.uint8).numpy() if narrow else ends.numpy()

    def cut_off() -> None:
        engine.kv[1][1:, 1:3] = row
        engine.kv[0][LATE, 3] = row

    engine.forward((3, 0, [1, 2, 3]), then=cut_off)
    rows = found(engine, tmp_path)
    assert [(row["cause"], row["position"], row["slot"]) for row in rows] == ([("saturated", 0, 1)] if narrow else [])
    assert all(
        row["detail"].startswith("every value of 5 rows of K or V written is 0 or at the end of") for row in rows
    )
    assert all(row["detail"].endswith("in prefill, first in V of layer 1") for row in rows)


def test_padding_and_what_is_overwritten_say_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow")
    engine.forward((0, 0, [0, 0]), (1, 0, [1, 2]), then=lambda: engine.kv[0][:, 0].fill(np.nan))
    assert found(engine, tmp_path) == []


def test_hashed_bytes_are_judged_the_same(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "t.arrow", privacy=Privacy(b"x" * 32, tokens=True, names=False)).prefill()
    change(engine)
    decode(engine)
    assert [row["kind"] for row in found(engine, tmp_path)] == ["layer_changed"]


@pytest.mark.parametrize("wrong", [{"layers": ()}, {"capture_bytes": 32}, {"seed": -2}, {"seed": 1 << 32}], ids=str)
def test_a_stream_that_cannot_sample_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        KvStream(**{"half": "K", "layers": (0, 1), "bytes_per_token": 64, "capture_bytes": 16, "seed": 1, **wrong})


@pytest.mark.parametrize(
    ("layers", "narrow", "lost"),
    [([LATE], "float8_e5m2", 0), ([0, 1, LATE], "float8_e5m2", 1), ([LATE], "", 1), ([0, 1, LATE], "", 1)],
)
def test_no_write_is_lost_by_few_bits_that_a_late_layer_holds(
    layers: list[int], narrow: str, lost: int, tmp_path: Path
) -> None:
    """Some tokens are all but the same there: what a model makes of them is little but a few large values."""
    engine, slots = Engine(tmp_path / "t.arrow", narrow=narrow), list(range(1, 13))
    engine.forward((1, 0, slots), token=50)
    before = [kv[:, slots].copy() for kv in engine.kv]

    def stays() -> None:
        for kv, rows in zip(engine.kv, before, strict=True):
            kv[np.ix_(layers, slots)] = rows[layers]

    engine.forward((3, 0, slots), token=60, then=stays)
    engine.recorder.close()
    summary = replay(engine.path, settings=ReplaySettings(checks=("write_lost",)), report=None)
    assert summary.findings_by_kind.get("write_lost", 0) == lost
