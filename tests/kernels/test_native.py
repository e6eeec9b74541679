"""Machine code: it does what plain loops do, refuses what does not fit, and a bad file is no harm."""

import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvcanary.kernels import dispatch, native
from kvcanary.kernels.dispatch import In64, Out64, Out64x2
from kvcanary.kernels.ops.hash.kv_source import fold_source_loops
from kvcanary.kernels.ops.oracle.reference import oracle_tokens_loops

from ..support.places import ROOT


def compiled(loops: Any) -> Any:
    """The machine code of loops, made now."""
    found = native.caller(dispatch.object_code(loops), dispatch.name_of(loops), dispatch.parameters_of(loops))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["_HEADER", "_TUPLE_ITEMS"])
def test_pythons_that_lay_things_out_otherwise_share_no_code(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    here = native.machine_name()
    monkeypatch.setattr(native, name, getattr(native, name) + 8)
    assert native.machine_name() != here


@pytest.mark.parametrize("step", [1, 2, -3])
def test_arrays_of_any_stride(step: int) -> None:
    run = compiled(oracle_tokens_loops)
    ids = np.arange(1, 61, dtype=np.int64)[::step]
    ids.flags.writeable = False
    room = np.full(60, -77, np.int64)
    outs = [room.copy()[::step] for _ in range(2)]
    run(ids, ids * ids, 1 << 20, outs[0])
    oracle_tokens_loops(ids, ids * ids, 1 << 20, outs[1])
    assert outs[0].tolist() == outs[1].tolist() and len(set(outs[0].tolist())) > 10


def test_two_dimensions() -> None:
    run = compiled(fold_source_loops)
    words = np.random.default_rng(1).integers(0, 1 << 63, (12, 10), np.uint64)[::-2, 1::3]
    slots = np.array([3, 0, 5, 2], np.int64)
    outs = [np.full(4, -77, np.int64) for _ in range(2)]
    run(words, 1, 0, 3, 3, 6, slots, outs[0])
    fold_source_loops(words, 1, 0, 3, 3, 6, slots, outs[1])
    assert outs[0].tolist() == outs[1].tolist() and -77 not in outs[0]


def test_integers_of_any_kind() -> None:
    run = compiled(oracle_tokens_loops)
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
        ([1, 2], GOOD, 9, GOOD),
        (None, GOOD, 9, GOOD),
        (GOOD, GOOD, 1 << 63, GOOD),
        (GOOD, GOOD, 9.0, GOOD),
        (GOOD, GOOD, 9),
        (GOOD, GOOD, 9, GOOD, GOOD),
        (),
    ],
)
def test_what_does_not_fit_is_refused(args: Any) -> None:
    run = compiled(oracle_tokens_loops)
    with pytest.raises(TypeError, match="oracle_tokens_loops"):
        run(*args)
    assert (GOOD == 1).all()


def test_arrays_of_another_class_or_type_object_are_taken() -> None:
    run, out = compiled(oracle_tokens_loops), np.zeros((3, 4), np.int64)
    ids = np.arange(1, 5, dtype=np.int64)
    run(ids, ids * 7, 1 << 20, out[0])
    run(ids.view(np.recarray), ids * 7, 1 << 20, out[1])
    run(ids.astype(np.longlong), ids * 7, 1 << 20, out[2])
    assert out[0].any() and out[0].tolist() == out[1].tolist() == out[2].tolist()


def test_a_division_by_zero_raises() -> None:
    with pytest.raises(ArithmeticError, match="oracle_tokens_loops divides by zero"):
        compiled(oracle_tokens_loops)(GOOD, GOOD, 0, GOOD.copy())


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


def test_named_tuples_of_arrays() -> None:
    run = compiled(pair_loops)
    out = np.zeros(2, np.int64)
    run(Pair(GOOD[:2], GOOD[2:]), out)
    assert out.tolist() == [2, 2]
    for wrong in ((GOOD,), (GOOD, GOOD, GOOD), [GOOD, GOOD], (GOOD, None), (GOOD, GOOD[::2]), GOOD):
        with pytest.raises(TypeError):
            run(wrong, out)


def test_named_tuples_of_several_types() -> None:
    rows = np.zeros((2, 2), np.int64)
    compiled(mixed_loops)(Mixed(np.array([3, 4]), rows))
    assert rows.tolist() == [[0, 3], [0, 4]]


@dispatch.packed
def packed_loops(values: In64, several: Pair, out: Out64) -> None:
    for index in range(len(values)):
        out[index] += values[index] + several.first[index] + several.second[index]


def test_packed_loops_refuse_strides() -> None:
    run = compiled(packed_loops)
    out = np.zeros(2, np.int64)
    run(GOOD[:2], (GOOD[:2], GOOD[2:]), out)
    assert out.tolist() == [3, 3]
    for values, pair in ((GOOD[::2], (GOOD, GOOD)), (GOOD[:2], (GOOD, GOOD[::2]))):
        with pytest.raises(TypeError):
            run(values, pair, out)


def allocating_loops(values: In64, out: Out64) -> None:
    out[:] = np.sort(values)


def test_loops_that_need_more_than_memory_are_refused() -> None:
    with pytest.raises(Exception, match=r"allocating_loops|sort"):
        dispatch.object_code(allocating_loops)


def slicing_loops(values: In64, rows: Out64x2) -> None:
    part = rows[1, 1:]
    for index in range(len(part)):
        part[index] = values[1:][index]
    rows[0][0] = len(values[:9]) + len(values[5:3])
    rows[1:][0, 0] = rows.shape[1]


@pytest.mark.parametrize("step", [1, 2, -1])
def test_parts_of_arrays(step: int) -> None:
    rows = [np.zeros((2, 3), np.int64)[:, ::step] for _ in range(2)]
    values = np.array([3, 4, 5], np.int64)[:: abs(step)]
    for loops, out in zip((slicing_loops, compiled(slicing_loops)), rows, strict=True):
        loops(values, out)
    assert rows[0].tolist() == rows[1].tolist() and rows[0].any()


def test_a_file_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.o"
    assert native.read(path) is None
    native.keep(path, b"machine code")
    assert native.read(path) == b"machine code"
    whole = path.read_bytes()
    for bad in (b"", whole[:40], whole[:-1], whole[:-1] + struct.pack("B", whole[-1] ^ 1)):
        path.write_bytes(bad)
        assert native.read(path) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    native.keep(tmp_path / "file" / "a.o", b"machine code")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("index", [-1, 3])
def test_checked_loops_end_at_an_index_outside(index: int) -> None:
    code = (
        "import tests.support.checked_indices, numpy as np\n"
        "from kvcanary.kernels.dispatch import In64, Out64, select\n"
        "def loops(given: In64, at: int, out: Out64) -> None: out[0] = given[at]\n"
        "out = np.zeros(1, np.int64)\n"
        "select(loops, 'cpu')(np.arange(3), 2, out); print(*out, flush=True)\n"
        f"select(loops, 'cpu')(np.arange(3), {index}, out)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("2\n", -signal.SIGILL), ended.stderr
