"""K at some positions says what it must be at another, by angles that the trace shows itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvcanary.kernels.ops.token_rows.encoding import float_values
from kvcanary.replayer.model.shifts import find_shifts
from kvcanary.replayer.model.turns import TURNED, Turns
from kvcanary.replayer.model.written import EVENT, FURTHEST, POSITION, REQUEST, WrittenTokens
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.places import DATA

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

LENGTH, REQUESTS, VOCAB, LANES = 80, 24, 60, 8
ANGLES = 10_000.0 ** (-2 * np.arange(LANES) / 32)


def bytes_of(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return (bits + 0x8000 >> 16).astype("<u2").view(np.uint8).reshape(len(values), -1)
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(len(values), -1)


def written(
    seed: int,
    dtype: str,
    turned_at: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda _, position: position,
    *,
    length: int = LENGTH,
    angles: np.ndarray = ANGLES,
    step: int = 1,
) -> WrittenTokens:
    """Requests of random tokens, whose K is turned as at `turned_at(request, position)`, by `angles` `[lanes]` or `[n, lanes]`."""
    rng = np.random.default_rng(seed)
    position = np.tile(np.arange(0, length * step, step), REQUESTS)
    request = np.repeat(np.arange(REQUESTS), length)
    token = rng.integers(0, VOCAB, len(position))
    a, b = rng.normal(size=(2, VOCAB, LANES))
    at = turned_at(request, position)[:, None] * angles
    places = np.zeros((len(position), 9), np.int64)
    places[:, EVENT], places[:, REQUEST], places[:, POSITION] = request * 100 + position // 16, request, position
    places[:, FURTHEST] = position
    return WrittenTokens(token, bytes_of(a[token] * np.cos(at) + b[token] * np.sin(at), dtype), places)


def turns_of(*parts: WrittenTokens, dtype: str = "float32") -> Turns:
    turns = Turns(dtype)
    for part in parts:
        turns.add(part)
    return turns


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", sorted(TURNED))
def test_what_is_turned_as_at_another_position_is_found_and_nothing_else(dtype: str, seed: int) -> None:
    right = written(seed, dtype)
    turns = turns_of(right, dtype=dtype)
    assert turns.tell() == []
    assert turns.angles is not None
    assert turns.angles == pytest.approx(ANGLES[: len(turns.angles)], abs=2e-3)
    wrong = written(seed, dtype, lambda request, position: position + 3 * ((request == 5) & (position > 60)))
    found = turns_of(wrong, dtype=dtype).tell()
    assert found
    assert {one.place[REQUEST] for one in found} == {5}
    as_at = [one.as_at - one.place[POSITION] for one in found if one.as_at >= 0]  # of some it is not one position alone
    assert set(as_at) == {3}
    assert len(as_at) > 0.8 * len(found)
    assert all(one.place[POSITION] > 60 and one.others > 1 and one.much > 0.3 for one in found)


def test_what_is_turned_by_other_angles_is_right_at_no_position() -> None:
    rng = np.random.default_rng(9)
    data = written(1, "float32")
    off = np.flatnonzero((data.places[:, REQUEST] == 7) & (data.places[:, POSITION] > 50))
    values = data.data.view(np.float32).copy()
    values[off] = rng.permutation(values[off].reshape(-1)).reshape(len(off), -1)
    found = turns_of(WrittenTokens(data.keys, values.view(np.uint8), data.places)).tell()
    assert found
    assert {(one.place[REQUEST], one.as_at) for one in found} == {(7, -1)}


def test_it_goes_on_from_what_came_before_in_however_many_parts() -> None:
    whole = written(3, "float32", lambda request, position: position - (request == 20))
    found = turns_of(whole).tell()
    turns = Turns("float32")
    for begin in range(0, len(whole.keys), 500):
        turns.add(WrittenTokens(*(part[begin : begin + 500] for part in whole)))
        if begin % 1000 == 0:
            turns.judge()
    again = turns.tell()
    assert {one.place[REQUEST] for one in found} == {one.place[REQUEST] for one in again} == {20}


def test_what_follows_from_more_than_a_position_tells_nothing() -> None:
    rng = np.random.default_rng(2)
    plain = written(4, "float32", lambda _, position: position * 0)  # no rotation
    assert turns_of(plain).angles is None
    learnt = written(4, "float32")  # an embedding for each position
    values = (
        learnt.data.view(np.float32) + rng.normal(size=(LENGTH, LANES)).astype(np.float32)[learnt.places[:, POSITION]]
    )
    assert turns_of(WrittenTokens(learnt.keys, values.view(np.uint8), learnt.places)).tell() == []
    noise = rng.normal(size=(len(learnt.keys), LANES)).astype(np.float32)
    turns = turns_of(WrittenTokens(learnt.keys, noise.view(np.uint8), learnt.places))
    assert (turns.tell(), turns.angles) == ([], None)


def test_where_every_second_position_alone_is_known_several_angles_do_the_same() -> None:
    turns = turns_of(written(5, "float32", step=2))
    assert (turns.tell(), turns.angles) == ([], None)


def test_a_length_may_choose_the_angles() -> None:
    position = np.tile(np.arange(LENGTH), REQUESTS)
    long = position[:, None] >= 70  # as if only what is longer were turned otherwise
    data = written(6, "float32", angles=np.where(long, ANGLES / 2, ANGLES))
    data.places[:, FURTHEST] = np.where(long[:, 0], 400, position)
    assert turns_of(data).tell() == []


@pytest.mark.parametrize("dtype", sorted(TURNED))
def test_most_requests_are_turned_by_positions_of_others_each_by_another_number(dtype: str) -> None:
    off = np.array([0, 17, 0, 24, 31, 0, 60, 108])
    some = slice(0, len(off) * LENGTH)
    right = WrittenTokens(*(part[some] for part in written(0, dtype)))
    assert find_shifts(right.keys, float_values(right.data, dtype).astype(np.float64), right.places, dtype) == []
    wrong = written(0, dtype, lambda request, position: position + off[request % len(off)])
    found = turns_of(WrittenTokens(*(part[some] for part in wrong)), dtype=dtype).tell()
    assert {one.place[REQUEST] for one in found} == set(np.flatnonzero(off).tolist())
    assert all(one.as_at - one.place[POSITION] == off[one.place[REQUEST]] and one.alike > 1 for one in found)


def test_a_length_may_choose_by_how_much_parts_are_shifted() -> None:
    data = written(1, "float32", lambda request, position: position + 9 * (request > 4))
    some = WrittenTokens(*(part[: 8 * LENGTH] for part in data))
    values = some.data.view(np.float32).astype(np.float64)
    assert find_shifts(some.keys, values, some.places, "float32")
    some.places[:, FURTHEST] += 1000 * (some.places[:, REQUEST] > 4)
    assert find_shifts(some.keys, values, some.places, "float32") == []


@pytest.mark.parametrize("scale", [0.5, 0.75, 2.0])
def test_other_angles_are_no_shift_though_they_are_one_at_some_positions(scale: float) -> None:
    others = np.where(np.arange(REQUESTS * LENGTH)[:, None] // LENGTH % 8 > 4, scale * ANGLES, ANGLES)
    data = WrittenTokens(*(part[: 8 * LENGTH] for part in written(1, "float32", angles=others)))
    assert find_shifts(data.keys, data.data.view(np.float32).astype(np.float64), data.places, "float32") == []


@pytest.mark.parametrize("scale", [0.9, 0.25, 0.0])
def test_where_the_first_value_does_not_turn_by_one_parts_are_not_laid_beside_one_another(scale: float) -> None:
    data = written(2, "float32", lambda request, position: position + 5 * (request % 3), angles=scale * ANGLES)
    assert find_shifts(data.keys, data.data.view(np.float32).astype(np.float64), data.places, "float32") == []


def test_parts_that_were_computed_otherwise_are_shifted_by_nothing() -> None:
    rng = np.random.default_rng(3)
    data = written(3, "float32")
    values = data.data.view(np.float32).astype(np.float64)
    other = data.places[:, REQUEST] % 2 == 1
    values[other] = rng.normal(size=(int(other.sum()), LANES))
    assert find_shifts(data.keys, values, data.places, "float32") == []


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows_and_bytes_that_are_no_numbers(rows: int) -> None:
    whole = written(7, "float32")
    some = WrittenTokens(*(part[:rows] for part in whole))
    assert turns_of(some).tell() == []
    data = whole.data.copy()
    data[::7] = 0xFF  # NaN
    places = whole.places.copy()
    places[::5, POSITION] = -3
    places[::11, POSITION] = 1 << 40
    assert turns_of(WrittenTokens(whole.keys, data, places)).tell() == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "transformers-positions_are_rounded_before_they_are_turned_into_angles",
            "at position 267 as it is at position 268",
        ),
        (
            "transformers-short_prompt_puts_its_angles_over_those_of_the_answers",
            "at position 47 as it is at position 60",
        ),
        (
            "vllm-rotation_counts_on_into_the_next_sequence",
            "at position 33 as it is at position 76, +43 like 3 more tokens",
        ),
    ],
)
def test_a_real_engine_that_turns_k_by_another_position_than_it_says(name: str, said: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    trace = DATA / "corpus" / f"{name}.arrow"
    summary = replay(trace, settings=ReplaySettings(), report=tmp_path)
    assert summary.verdict.value == "corrupt"
    rows = pq.read_table(tmp_path / "findings.parquet").to_pylist()
    assert {(row["kind"], row["cause"]) for row in rows} == {("token_bytes", "rotated")}
    assert any(said in row["detail"] for row in rows), [row["detail"] for row in rows]
