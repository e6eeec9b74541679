"""The frame kernels compile for a GPU, from a machine that has none; what they find is tested with the recorder."""

import os
import subprocess
import sys

import pytest
from kvcanary.kernels.capture.frames import ATTENTION, KV_CHANGES, LUT_CHANGES, TABLE_CHANGES, FrameLayout

COMPILE = """
import warnings
warnings.simplefilter("ignore")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvcanary.kernels.capture import frame_kernels as inside

longs, shorts = ("ticket", "kv_indices", "window_indices"), ("kv_indptr", "window_indptr", "qo_indptr")
types = dict.fromkeys(longs, "*i64") | dict.fromkeys(shorts, "*i32")
types |= {"memory": ("*i64",) * 3, "tokens": ("*i64",) * 3, "lens": ("*i32",) * 2}
types["requests"] = ("*i64", "*i64", "*i32", "*i32")


def build(kernel, numbers=0, **constants):
    given = types | {"numbers": ("i32",) * numbers}
    for p in kernel.params:
        tells_nothing = p.do_not_specialize and p.do_not_specialize_on_alignment
        assert p.is_constexpr or tells_nothing or type(given[p.name]) is tuple
    signature = {name: "constexpr" if name in constants else given.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    print(len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]) > 0)


types |= {"values": ("*i64", "*i64"), "carried": ("i32",) * 4}
build(inside.write_ticket_kernel, 17)
build(inside.begin_kernel, 6, HAS_MINUS=True, HAS_EXTEND=True, HAS_LENS=False, LUT_INT64=False, TILE=512)
build(inside.begin_kernel, 6, HAS_MINUS=False, HAS_EXTEND=False, HAS_LENS=True, LUT_INT64=True, TILE=512)
build(inside.attention_kernel, HAS_QO=True, HAS_WINDOW=True, TILE=512)
build(inside.attention_kernel, HAS_QO=False, HAS_WINDOW=False, TILE=512)
build(inside.end_kernel, TILE=512)
types |= {"first": "*i32", "second": "*i64", "pool": "*i64", "slots": "*i64", "out": "*i64"}
types |= dict.fromkeys(("first_reads", "second_reads"), "*i1")
for after, saved in ((False, False), (True, False), (False, True), (True, True)):
    build(inside.state_kernel, 9, AFTER=after, SAVED=saved, TILE=512)
from kvcanary.kernels.ops.state_hash.triton import slots_kernel
build(slots_kernel, TILE=512)
"""


@pytest.mark.long
def test_they_compile_for_a_gpu(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True"] * 11


@pytest.mark.parametrize("bs", [0, 1, 5])
def test_sections_follow_one_another(bs):
    sizes = {"table_capacity": 3, "lut_capacity": 2, "kv_capacity": 5, "tile": 16, "value_words": 9}
    layout = FrameLayout(bs=bs, tokens=7, stream_words=(2, 4), **sizes)
    assert layout.lens_at == 3 * bs + 3 * 7 + 7 * 6
    assert layout.fixed == layout.lens_at + 2 * bs
    table, lut, kv, attention = (layout.sections[sort] for sort in (TABLE_CHANGES, LUT_CHANGES, KV_CHANGES, ATTENTION))
    assert table == (layout.fixed, 3, 18)
    assert lut == (table.at + 3 * 18, 2, 3)
    assert kv == (lut.at + 2 * 3, 5, 6)
    assert layout.values_at == attention.at == kv.at + 5 * 6
    assert layout.words == layout.values_at + 7 * 9
