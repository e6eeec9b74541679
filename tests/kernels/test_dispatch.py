"""Backends: names, one compilation an op, the cache on disk, and nothing imported before it is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import kvcanary.kernels
import numpy as np
import pytest
from kvcanary.kernels import dispatch, native
from kvcanary.kernels.dispatch import In64, Out64, packed, primitive, select
from kvcanary.kernels.ops.hash.reference import as_i64, as_u64

KERNELS = Path(kvcanary.kernels.__file__).parent


def double_loops(values: In64, out: Out64) -> None:
    """Twice each value, wrapping."""
    for i in range(len(values)):
        out[i] = as_i64(as_u64(values[i]) + as_u64(values[i]))


def test_backends_by_name() -> None:
    assert select(double_loops, "reference") is double_loops
    assert select(double_loops, "cpu") is select(double_loops, "cpu")
    with pytest.raises(ValueError, match="'gpu', expected one of reference, cpu, triton"):
        select(double_loops, "gpu")
    with pytest.raises(NotImplementedError, match="backend='cpu'"):
        select(double_loops, "triton")


def test_the_same_loops_wrap_alike() -> None:
    values = np.array([1, -1, 1 << 62, -(1 << 63), (1 << 63) - 1])
    values.flags.writeable = False
    for strided in (values, values[::-2]):
        outs = [np.full(len(strided), -77) for _ in range(2)]
        select(double_loops, "reference")(strided, outs[0])
        select(double_loops, "cpu")(strided, outs[1])
        assert outs[0].tolist() == outs[1].tolist()
    assert outs[0].tolist() == [-2, -(1 << 63), 2]


def test_other_types_are_refused_not_compiled() -> None:
    values, out = np.arange(3), np.zeros(3, np.int64)
    for wrong in (values.astype(np.int32), values.reshape(1, 3), None):
        with pytest.raises(TypeError, match="double_loops"):
            select(double_loops, "cpu")(wrong, out)  # type: ignore[arg-type]


@packed
def packed_loops(values: In64, out: Out64) -> None:
    """Twice each value, of arrays without gaps."""
    for i in range(len(values)):
        out[i] = 2 * values[i]


def test_packed_loops_take_no_strides() -> None:
    values, out = np.arange(6), np.zeros(6, np.int64)
    select(packed_loops, "cpu")(values, out)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    for strided in (values[::2], values[::-1]):
        with pytest.raises(TypeError):
            select(packed_loops, "cpu")(strided, out)


def waited_for_loops(out: Out64) -> None:
    out[0] = 1


def test_who_waits_for_a_compilation_is_told_once() -> None:
    said: list[int] = []
    before = select(waited_for_loops, "reference", before_compiling=lambda: said.append(0))
    assert before is waited_for_loops
    for _ in range(2):
        select(waited_for_loops, "cpu", before_compiling=lambda: said.append(1))
    assert said == [1]


class Both(NamedTuple):
    given: In64
    made: Out64


@primitive()
def fill(out: Out64) -> None:
    out[0] = 1


def direct_loops(values: In64, out: Out64) -> None:
    out[0] = values[0]
    values[0] = 2


def sliced_loops(values: In64, out: Out64) -> None:
    for i in range(len(out)):
        part, rest = values[i:], out[i:]
        rest[0] = 1
        part[0] += 1


def handed_on_loops(values: In64) -> None:
    fill(values)


def field_loops(both: Both) -> None:
    fill(both.made)
    both.given[0] = 1


@pytest.mark.parametrize("loops", [direct_loops, sliced_loops, handed_on_loops, field_loops])
def test_loops_that_store_into_what_is_declared_as_read_only(loops: Any) -> None:
    with pytest.raises(TypeError, match=f"{loops.__name__} stores into (values|part|both.given), which is declared"):
        select(loops, "cpu")


def bad_result_loops(values: In64) -> int:
    return len(values)


def bad_parameter_loops(values: list[int]) -> None:
    values.clear()


def test_loops_that_have_no_signature() -> None:
    with pytest.raises(TypeError, match="expected None"):
        select(bad_result_loops, "cpu")
    with pytest.raises(TypeError, match="parameter values"):
        select(bad_parameter_loops, "cpu")


def test_typed_pointers_of_an_older_llvmlite_are_read_with_our_opaque_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba 0.61 brings llvmlite 0.44, whose own context reads typed pointers only."""
    import llvmlite
    from kvcanary.kernels import compiling

    made: list[bool] = []
    monkeypatch.setattr(llvmlite, "opaque_pointers_enabled", False, raising=False)
    # the function itself takes no argument any more, and in 0.44 whether pointers are opaque
    monkeypatch.setattr(compiling.llvm.ffi, "lib", SimpleNamespace(LLVMPY_ContextCreate=made.append))
    monkeypatch.setattr(compiling.llvm.context, "ContextRef", lambda made: "opaque")
    fresh = compiling.pointers_context.__wrapped__
    assert (fresh(), made) == ("opaque", [True])
    monkeypatch.setattr(llvmlite, "opaque_pointers_enabled", True, raising=False)
    assert fresh() is None


def test_the_cache_folder_is_the_users_choice_first(tmp_path: Path) -> None:
    folder = dispatch.cache_folder("1.0", str(tmp_path / "mine"))
    assert folder is not None and folder.parent == tmp_path / "mine" and folder.is_dir()
    assert dispatch.cache_folder("1.1", str(tmp_path / "mine")) != folder
    (tmp_path / "file").write_text("")
    assert dispatch.cache_folder("1.0", str(tmp_path / "file")) is None


def test_the_cache_is_the_users_and_without_one_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "kernels"
    copy.mkdir()
    (copy / "dispatch.py").write_text("")
    monkeypatch.setattr(dispatch, "__file__", str(copy / "dispatch.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = dispatch.cache_folder("1.0", "")
    assert folder is not None and folder.parent == tmp_path / "cache" / "kvcanary"
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = dispatch.cache_folder("1.0", "")
    assert folder is not None and folder.parent == copy / "__pycache__"


def test_the_cache_folder_follows_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(dispatch, "__file__", str(copy / "dispatch.py"))
    before = dispatch.cache_folder("1.0", "")
    with (copy / "hashing.py").open("a") as source:
        source.write("# changed\n")
    assert dispatch.cache_folder("1.0", "") != before


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_no_code_from_where_another_user_may_have_put_it(tmp_path: Path, mode: int, caplog: Any) -> None:
    folder = dispatch.cache_folder("1.0", str(tmp_path))
    assert folder is not None
    folder.chmod(mode)
    assert dispatch.cache_folder("1.0", str(tmp_path)) is None
    assert "another user may write to it" in caplog.text
    folder.chmod(0o700)
    assert dispatch.cache_folder("1.0", str(tmp_path)) == folder
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        assert dispatch.cache_folder("1.0", str(tmp_path)) is None
        os.chown(folder, 0, 0)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    assert dispatch.cache_folder("1.0", str(tmp_path)) is None


@pytest.mark.parametrize("loaded", ["", "import yaml; "])
def test_nothing_of_the_current_folder_configures_numba(tmp_path: Path, loaded: str) -> None:
    (tmp_path / ".numba_config.yaml").write_text(f"cache_dir: {tmp_path}/pickles\ndisable_jit: 1\nopt: nonsense\n")
    code = f"""{loaded}
from kvcanary.kernels import dispatch
dispatch.import_numba()
from numba.core import config
config.reload_config()
import yaml
print(repr(config.CACHE_DIR), config.DISABLE_JIT, yaml.safe_load("1"))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert (run.stdout, run.stderr) == ("'' 0 1\n", "")


PROBE = """
import sys, numpy as np
from kvcanary.kernels.ops.oracle import reference as oracle
from kvcanary.kernels.ops.plan import reference as plan
from kvcanary.kernels.ops.scatter import reference as scatter
from kvcanary.kernels.ops.verify import reference as verify
from kvcanary.kernels.ops.write import reference as write
assert not {"numba", "torch", "triton"} & set(sys.modules), "imported too early"
ones, out = np.ones(3, np.int64), np.zeros(3, np.int64)
oracle.oracle_tokens(request_ids=ones, positions=ones, vocab_size=9, out=out, backend="reference")
assert "numba" not in sys.modules, "the reference backend needs no compiler"
oracle.oracle_tokens(request_ids=ones, positions=ones * 2, vocab_size=1 << 20, out=out)
print(out.tolist(), "numba" in sys.modules)
"""


def test_compiled_code_is_kept_on_disk(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-W", "error", "-c", PROBE], env=environment, text=True, capture_output=True)
        for _ in range(2)
    ]
    assert [run.stderr for run in runs] == ["", ""]
    first, second = (run.stdout.split("]") for run in runs)
    assert first[0] == second[0]  # the same tokens
    assert first[1].split() == ["True"] and second[1].split() == ["False"]
    (code,) = tmp_path.glob("*/*")
    code.write_bytes(code.read_bytes()[:-1])  # is made again
    run = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], env=environment, text=True, capture_output=True)
    assert (run.stdout, run.stderr) == (runs[0].stdout, "") and native.read(code) is not None


WAITS = """
from kvcanary.kernels import dispatch
from kvcanary.kernels.ops.oracle import reference as oracle
dispatch.select(oracle.oracle_tokens_loops, "cpu", before_compiling=lambda: print("waits"))
"""


def test_nobody_is_told_of_what_is_on_the_disk(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    said = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", WAITS], env=environment, text=True, capture_output=True
        )
        assert run.stderr == ""
        said.append(run.stdout.split())
    assert said == [["waits"], []]


def test_without_a_cache_folder_it_compiles_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "file")}
    run = subprocess.run([sys.executable, "-c", PROBE], env=environment, text=True, capture_output=True)
    assert run.stderr == "" and run.stdout.split("]")[1].split() == ["True"]
