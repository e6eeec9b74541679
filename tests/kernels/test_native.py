"""Machine code from the disk: it does what numba's form does, with any arguments, and a bad file is no harm."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvcanary.kernels import dispatch, native
from kvcanary.kernels.dispatch import In64, Out64, Out64x2
from kvcanary.kernels.ops.hash.kv_source import fold_source_loops
from kvcanary.kernels.ops.oracle.reference import oracle_tokens_loops
from kvcanary.kernels.replay_pass.state import translate_loops


def handed_on(*_: Any, **__: Any) -> None:
    raise LookupError("numba's form was asked for")


def loaded(path: Path, loops: Any) -> Any:
    """The machine code of loops, kept and loaded now; what it does not take raises `LookupError`."""
    native.keep(path, loops.__name__, dispatch.numba_form(loops), dispatch.parameters_of(loops))
    found = native.load(path, loops.__name__, dispatch.parameters_of(loops), lambda: handed_on)
    assert found is not None
    return found


def test_this_process_may_use_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert native.usable()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert native.usable()
    monkeypatch.setenv("NUMBA_OPT", "0")
    assert not native.usable()


@pytest.mark.parametrize("name", ["_HEADER", "_TUPLE_ITEMS"])
def test_pythons_that_lay_things_out_otherwise_share_no_code(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    here = native.machine_name()
    monkeypatch.setattr(native, name, getattr(native, name) + 8)
    assert native.machine_name() != here


@pytest.mark.parametrize("step", [1, 2, -3])
def test_arrays_of_any_stride(tmp_path: Path, step: int) -> None:
    run = loaded(tmp_path / "a.o", oracle_tokens_loops)
    ids = np.arange(1, 61, dtype=np.int64)[::step]
    ids.flags.writeable = False
    room = np.full(60, -77, np.int64)
    outs = [room.copy()[::step] for _ in range(2)]
    run(ids, ids * ids, 1 << 20, outs[0])
    oracle_tokens_loops(ids, ids * ids, 1 << 20, outs[1])
    assert outs[0].tolist() == outs[1].tolist() and len(set(outs[0].tolist())) > 10


def test_two_dimensions(tmp_path: Path) -> None:
    run = loaded(tmp_path / "a.o", fold_source_loops)
    words = np.random.default_rng(1).integers(0, 1 << 63, (12, 10), np.uint64)[::-2, 1::3]
    slots = np.array([3, 0, 5, 2], np.int64)
    outs = [np.full(4, -77, np.int64) for _ in range(2)]
    run(words, 1, 0, 3, 3, 6, slots, outs[0])
    dispatch.numba_form(fold_source_loops)(words, 1, 0, 3, 3, 6, slots, outs[1])
    assert outs[0].tolist() == outs[1].tolist() and -77 not in outs[0]


def test_integers_of_any_kind(tmp_path: Path) -> None:
    run = loaded(tmp_path / "a.o", oracle_tokens_loops)
    ids, out = np.arange(1, 5, dtype=np.int64), np.zeros((2, 4), np.int64)
    run(ids, ids[::-1], np.int32(1 << 20), out[0])
    run(ids, ids[::-1], 1 << 20, out[1])
    assert out[0].tolist() == out[1].tolist() and out.any()


READ_ONLY = np.zeros(4, np.int64)
READ_ONLY.flags.writeable = False
UNALIGNED = np.frombuffer(b"\0" * 33, np.int64, 4, 1)
GOOD = np.ones(4, np.int64)


@pytest.mark.parametrize(
    "args",
    [
        (GOOD, GOOD, 9, READ_ONLY),
        (UNALIGNED, GOOD, 9, GOOD),
        (GOOD.astype(np.int32), GOOD, 9, GOOD),
        (GOOD.view(np.uint64), GOOD, 9, GOOD),
        (GOOD.reshape(2, 2), GOOD, 9, GOOD),
        (GOOD.view(np.recarray), GOOD, 9, GOOD),
        ([1, 2], GOOD, 9, GOOD),
        (None, GOOD, 9, GOOD),
        (GOOD, GOOD, 1 << 63, GOOD),
        (GOOD, GOOD, 9.0, GOOD),
        (GOOD, GOOD, 0, GOOD.copy()),  # which divides by zero
        (GOOD, GOOD, 9),
        (GOOD, GOOD, 9, GOOD, GOOD),
        (),
    ],
)
def test_what_does_not_fit_is_numbas_to_judge(tmp_path: Path, args: Any) -> None:
    run = loaded(tmp_path / "a.o", oracle_tokens_loops)
    with pytest.raises(LookupError):
        run(*args)
    assert (GOOD == 1).all()


def test_names_are_numbas_to_judge(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        loaded(tmp_path / "a.o", oracle_tokens_loops)(GOOD, GOOD, 9, out=GOOD)


class Pair(NamedTuple):
    first: In64
    second: In64


class Mixed(NamedTuple):
    values: In64
    rows: Out64x2


def pair_loops(several: Pair, out: Out64) -> None:
    for index in range(len(several.first)):
        out[index] += several.first[index] + several.second[index]


def mixed_loops(several: Mixed) -> None:
    for index in range(len(several.values)):
        several.rows[index, 1] = several.values[index]


def test_named_tuples_of_arrays(tmp_path: Path) -> None:
    run = loaded(tmp_path / "a.o", pair_loops)
    out = np.zeros(2, np.int64)
    run(Pair(GOOD[:2], GOOD[2:]), out)
    assert out.tolist() == [2, 2]
    for wrong in ((GOOD,), (GOOD, GOOD, GOOD), [GOOD, GOOD], (GOOD, None), (GOOD, GOOD[::2]), GOOD):
        with pytest.raises(LookupError):
            run(wrong, out)


def test_numba_takes_named_tuples_of_any_layout() -> None:
    out, rows = np.zeros(2, np.int64), np.zeros((2, 2), np.int64)
    dispatch.numba_caller(pair_loops)(Pair(GOOD[::2], GOOD[:2]), out)
    assert out.tolist() == [2, 2]
    dispatch.numba_caller(mixed_loops)(Mixed(np.array([3, 4]), rows))
    assert rows.tolist() == [[0, 3], [0, 4]]
    with pytest.raises(TypeError):
        dispatch.numba_caller(pair_loops)(Pair(GOOD, GOOD.astype(np.int32)), out)


@dispatch.packed
def packed_loops(values: In64, several: Pair, out: Out64) -> None:
    for index in range(len(values)):
        out[index] += values[index] + several.first[index] + several.second[index]


def test_packed_loops_hand_strides_on(tmp_path: Path) -> None:
    run = loaded(tmp_path / "a.o", packed_loops)
    out = np.zeros(2, np.int64)
    run(GOOD[:2], (GOOD[:2], GOOD[2:]), out)
    assert out.tolist() == [3, 3]
    for values, pair in ((GOOD[::2], (GOOD, GOOD)), (GOOD[:2], (GOOD, GOOD[::2]))):
        with pytest.raises(LookupError):
            run(values, pair, out)


def allocating_loops(values: In64, out: Out64) -> None:
    out[:] = np.sort(values)


def test_loops_that_need_more_than_memory_are_not_kept(tmp_path: Path) -> None:
    form = dispatch.numba_form(allocating_loops)
    native.keep(tmp_path / "a.o", "allocating_loops", form, dispatch.parameters_of(allocating_loops))
    assert list(tmp_path.iterdir()) == []


def test_numba_made_otherwise_inside_keeps_nothing(tmp_path: Path) -> None:
    native.keep(tmp_path / "a.o", "oracle_tokens_loops", oracle_tokens_loops, [])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_whole(tmp_path: Path) -> None:
    path, parameters = tmp_path / "a.o", dispatch.parameters_of(translate_loops)
    assert native.load(path, "translate_loops", parameters, lambda: handed_on) is None
    loaded(path, translate_loops)
    whole = path.read_bytes()
    for bad in (b"", whole[:40], whole[:-1], whole[:-1] + struct.pack("B", whole[-1] ^ 1)):
        path.write_bytes(bad)
        assert native.load(path, "translate_loops", parameters, lambda: handed_on) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    form = dispatch.numba_form(translate_loops)
    native.keep(tmp_path / "file" / "a.o", "translate_loops", form, dispatch.parameters_of(translate_loops))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
