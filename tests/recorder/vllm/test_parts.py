"""The adapter's parts on their own: the plugin, hooks at import, layouts of the KV cache, reads, steps that wait."""

import importlib
import logging
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.forward_input import TableRead
from kvcanary.recorder.capture.host_arrays import gather_kv
from kvcanary.recorder.engines.common.hooking import WhenImported, when_imported
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.vllm import hooks as vllm_hooks
from kvcanary.recorder.engines.vllm.hooks import MODULES, RUNNER_V1, TARGETS, hook_module
from kvcanary.recorder.engines.vllm.identity import identity_of
from kvcanary.recorder.engines.vllm.kv import head_views, layer_number, row_source
from kvcanary.recorder.engines.vllm.layout import kind_of, ranks_of
from kvcanary.recorder.engines.vllm.step import Step, VllmRequest, VllmRequests, levels, table_read

from .fake_engine import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from .groups import group

# The plugin


def in_a_process(code: str, **environment: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


HEAVY = "[m for m in ('numpy', 'numba', 'llvmlite', 'pyarrow', 'torch', 'vllm') if m in sys.modules]"
PLUGIN = "import sys; from kvcanary.recorder.engines.vllm import plugin; before = list(sys.meta_path); plugin(); "


def test_nothing_happens_where_no_recording_is_asked_for() -> None:
    assert in_a_process(PLUGIN + f"print({HEAVY}, sys.meta_path == before)") == "[] True"


def test_the_engine_s_modules_are_waited_for_and_no_compiler_is_imported(tmp_path: Path) -> None:
    # vLLM's CPU worker looks through all modules at its start and stumbles over llvmlite, which numba brings.
    code = PLUGIN + f"plugin(); print({HEAVY}, len(sys.meta_path) - len(before))"
    told = in_a_process(code, KVCANARY_TRACE=str(tmp_path)).splitlines()[-1]
    assert not {"numba", "llvmlite", "torch", "vllm"} & set(told.replace("'", " ").replace(",", " ").split())
    assert told.endswith(" 1"), "a second call waits no second time"


def test_a_wrong_setting_is_logged_and_nothing_is_recorded(tmp_path: Path) -> None:
    code = "import logging; logging.basicConfig(); " + PLUGIN + "print(sys.meta_path == before)"
    told = in_a_process(code, KVCANARY_TRACE=str(tmp_path), KVCANARY_CAPTURE_BYTES="7")
    assert told == "True"


# Hooks at import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"waited_for_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return name


def test_a_module_is_waited_for(module: str) -> None:
    seen: list[int] = []
    when_imported({module: lambda found: seen.append(found.VALUE)})
    assert seen == []
    found = importlib.import_module(module)
    assert seen == [7]
    assert found.__spec__ is not None
    assert type(found.__spec__.loader).__name__ == "SourceFileLoader", "nothing of ours is left behind"
    when_imported({module: lambda found: seen.append(found.VALUE + 1)})
    assert seen == [7, 8], "one that is there is not waited for"


def test_two_may_wait_for_a_module(module: str) -> None:
    seen: list[str] = []
    when_imported({module: lambda _: seen.append("first")})
    when_imported({module: lambda _: seen.append("second")})
    importlib.import_module(module)
    assert sorted(seen) == ["first", "second"]


def test_a_module_that_fails_fails_as_ever(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyError('its own')\n")
    seen: list[Any] = []
    when_imported({module: seen.append, "no.such.module": seen.append})
    with pytest.raises(KeyError, match="its own"):
        importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no.such.module")
    assert seen == []
    assert WhenImported({}).find_spec("anything", None) is None


def test_what_a_version_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    mine = [target for target in TARGETS if target.paths[0].startswith(f"{RUNNER_V1}:")]
    names = [target.paths[0].rpartition(".")[2] for target in mine]
    runner: Any = type("GPUModelRunner", (), {name: (lambda self: 5) for name in names})
    del runner.sample_tokens
    module = ModuleType(RUNNER_V1)
    module.GPUModelRunner = runner  # type: ignore[attr-defined]
    attachment: Any = SimpleNamespace(notes=[], fault=lambda *_: None)
    for target in mine:
        setattr(attachment, f"on_{target.hook}", lambda *_: None)
    before = runner.execute_model
    caplog.set_level(logging.WARNING, "kvcanary")
    hook_module(module, attachment)
    assert [note for note in attachment.notes if "sample_tokens: sampled tokens are not recorded" in note]
    assert runner.execute_model is not before
    assert runner().execute_model() == 5
    del runner._model_forward
    hooked = runner.execute_model
    hook_module(module, attachment)
    assert runner.execute_model is hooked, "without what is essential nothing is hooked"
    assert any("not recording" in entry.getMessage() for entry in caplog.records)


def test_a_module_of_another_shape_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "kvcanary")
    for name in MODULES:
        hook_module(ModuleType(name), SimpleNamespace(notes=None))
    assert caplog.records


def test_the_targets_have_hooks() -> None:
    from kvcanary.recorder.engines.vllm.attachment import VllmAttachment

    assert all(callable(getattr(VllmAttachment, f"on_{target.hook}")) for target in TARGETS)
    assert {target.paths[0].partition(":")[0] for target in TARGETS} == set(vllm_hooks.MODULES)


# Layouts


def strided(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Return random values of a shape whose dimensions lie in memory in another order."""
    generator = torch.Generator().manual_seed(1)
    memory = torch.rand([shape[d] for d in order], generator=generator)
    return memory.permute([order.index(d) for d in range(len(shape))])


BLOCKS, HEADS, TOKENS, DIM = 5, 3, 4, 8
LAYOUTS = {
    "tokens before heads": ((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 2, 1, 3)),
    "heads before tokens": ((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3)),
    "halves first": ((2, BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3, 4)),
    "halves in a block": ((BLOCKS, 2, TOKENS, HEADS, DIM), (0, 1, 2, 3, 4)),
    "halves in a block, heads first": ((BLOCKS, 2, TOKENS, HEADS, DIM), (0, 1, 3, 2, 4)),
    "a latent": ((BLOCKS, TOKENS, DIM), (0, 1, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_source_reads_the_bytes_of_the_first_head(name: str) -> None:
    kv = strided(*LAYOUTS[name])
    views = head_views(kv, SimpleNamespace(head_size=DIM, head_size_v=DIM), BLOCKS * TOKENS)
    assert set(views) == ({"K"} if name == "a latent" else {"K", "V"})
    slots = np.random.default_rng(3).permutation(BLOCKS * TOKENS)
    for half, view in views.items():
        source = row_source(view, BLOCKS * TOKENS, 16)
        if source is None:  # K and V of a token take turns: the last V would be read past the end
            assert (name, half) == ("heads before tokens", "V")
            continue
        out = gather_kv(_numpy(source), slots, 16)
        for slot, got in zip(slots.tolist(), out, strict=True):
            block, token = divmod(slot, TOKENS)
            full = {3: kv[block, token]} if kv.dim() == 3 else None
            if full is None and kv.dim() == 4:
                both = kv[block, 0, token]
                wanted = both[:DIM] if half == "K" else both[DIM:]
            elif full is None:
                number = "KV".index(half)
                wanted = kv[number, block, token, 0] if kv.shape[0] == 2 else kv[block, number, token, 0]
            else:
                wanted = full[3]
            assert got.tobytes() == wanted.contiguous().numpy().tobytes()[:16]


def _numpy(source: Any) -> Any:
    import dataclasses

    return dataclasses.replace(source, tensor=source.tensor.numpy())


def test_a_layout_that_is_not_known_gives_nothing() -> None:
    spec = SimpleNamespace(head_size=DIM, head_size_v=DIM)
    assert head_views(torch.zeros(BLOCKS, 2 * HEADS, TOKENS, DIM), spec, BLOCKS * TOKENS) == {}
    assert head_views(torch.zeros(BLOCKS, TOKENS), spec, BLOCKS * TOKENS) == {}
    assert row_source(torch.zeros(BLOCKS, TOKENS, 3), BLOCKS * TOKENS, 16) is None
    assert row_source(torch.zeros(BLOCKS, DIM, TOKENS).transpose(1, 2), BLOCKS * TOKENS, 16) is None


def test_kinds_names_and_ranks() -> None:
    class Better(SlidingWindowSpec):  # a plugin's own, which may place its tokens as it likes
        pass

    class CrossAttentionSpec:
        pass

    class MLAAttentionSpec(FullAttentionSpec):
        pass

    specs = (FullAttentionSpec(), MLAAttentionSpec(), SlidingWindowSpec(), Better(), MambaSpec(), CrossAttentionSpec())
    assert [kind_of(spec) for spec in specs] == ["full", "full", "swa", "", "", ""]
    assert layer_number("model.layers.12.self_attn.attn") == 12
    assert layer_number("attn") == 0
    ranks = ranks_of(
        SimpleNamespace(
            tensor_parallel_size=4, pipeline_parallel_size=2, rank=6, data_parallel_rank=1, data_parallel_size=2
        )
    )
    assert (ranks.tp_rank, ranks.pp_rank, ranks.dp_rank) == (2, 1, 1)


# Requests


def test_tokens_grow_are_cut_and_start_over() -> None:
    known = VllmRequest("a")
    known.begin([5, 6, 7])
    for token in range(20):
        known.tokens.append([token])
    assert known.tokens.all().tolist() == [5, 6, 7, *range(20)]
    known.begin([1])
    known.tokens.append([])
    assert known.tokens.all().tolist() == [1]
    assert request_id_of("a") == known.request_id >= 0


def test_rows_are_lent_and_taken_back() -> None:
    known_requests = VllmRequests(3)
    first, second, third = (known_requests.see(name)[0] for name in "abc")
    assert known_requests.run(first, 1)
    assert known_requests.run(second, 1)
    assert not known_requests.run(first, 2)
    assert {first.row, second.row} == {1, 2}
    assert known_requests.run(third, 3), "the row of whoever has not run for longest"
    assert second.row == 0
    with pytest.raises(ValueError, match="more requests than the trace has rows"):
        for known in (first, second, third):
            known_requests.run(known, 4)
    known_requests.drop(third)
    assert known_requests.get("c") is None
    assert (first.row, second.row) == (2, 1) or (first.row, second.row) == (1, 2)


# Steps


@pytest.mark.parametrize("window", [0, 1, 3, 8, 9])
@pytest.mark.parametrize(("block_size", "table_block"), [(4, 4), (8, 4), (1, 1)])
def test_reads_are_those_of_plain_loops(window: int, block_size: int, table_block: int) -> None:
    rng = random.Random(window + 100 * block_size)
    prefix = np.array([0, 1, 4, 7, 8, 9, 17, 31], np.int64)
    table = torch.tensor([[rng.randrange(1, 60) for _ in range(32)] for _ in prefix], dtype=torch.int32)
    table[4, 0] = table[6, 2] = 0
    read = table_read(table, table_block, group(block_size, window), prefix)
    at = 0
    for r, length in enumerate(prefix.tolist()):
        first = max(0, length - window - 1) if window else 0
        assert (read.starts[r], read.counts[r]) == (first, length - first)
        for position in range(first, length):
            block = int(table[r, position // table_block])
            expected = block * table_block + position % table_block
            predecessor = window and length > window and position == first
            if predecessor and ((length - window) % block_size == 0 or block == 0):
                expected = 0  # its block may be another's already
            assert read.slots[at] == expected
            at += 1
    assert at == read.slots.size


@pytest.mark.parametrize(("kernels", "starts"), [(0, [0, 0, 0]), (2, [0, 1, 7]), (4, [0, 0, 4]), (3, [0, 0, 5])])
def test_of_another_window_what_the_kernels_read_is_all_there_is(kernels: int, starts: list[int]) -> None:
    prefix = np.array([0, 3, 9], np.int64)
    own = replace(group(4, 3), kernel_window=kernels)
    read = table_read(torch.arange(1, 25, dtype=torch.int32).view(3, 8), 4, own, prefix)
    assert read.window_observed
    assert (read.starts.tolist(), read.counts.tolist()) == (starts, (prefix - starts).tolist())


@pytest.mark.parametrize(("told", "kernels", "last"), [(None, 5, 5), (None, None, 0), (None, 0, 0), (6, 5, 0)])
def test_of_a_cache_that_keeps_all_a_window_of_the_kernels_alone_is_told(
    told: int | None, kernels: int | None, last: int
) -> None:
    own = replace(group(4), kernel_window=kernels, spec=SimpleNamespace(sliding_window=told))
    read = table_read(torch.arange(1, 25, dtype=torch.int32).view(3, 8), 4, own, np.array([0, 3, 9], np.int64))
    assert (read.last, read.counts.tolist()) == (last, [0, 3, 9])


def step_of(prefix: list[int], extend: list[int], written: list[int], reads: list[list[int]]) -> tuple[Step, TableRead]:
    made = Step(
        names=tuple("abcdef"[: len(prefix)]),
        prefix=np.array(prefix, np.int64),
        extend=np.array(extend, np.int64),
        input_ids=np.zeros(len(written), np.int64),
        positions=np.zeros(len(written), np.int64),
        tables=(),
        written=(np.array(written, np.int64),),
        drafted=frozenset(),
    )
    counts = np.array([len(slots) for slots in reads], np.int64)
    flat = np.array([slot for slots in reads for slot in slots], np.int64)
    return made, TableRead(starts=np.zeros_like(counts), counts=counts, slots=flat)


def test_who_reads_what_others_write_waits_for_them() -> None:
    made, read = step_of([0, 2, 4, 3], [2, 2, 1, 1], [8, 9, 10, 11, 30, 40], [[], [8, 9], [8, 9, 10, 11], [50, 51, 52]])
    assert levels(made, [read], np.array([True] * 4)).tolist() == [0, 1, 2, 0]
    assert levels(made, [read], np.array([True, False, True, True])).tolist() == [0, 0, 1, 0]
    assert levels(made, [read], np.array([False] * 4)).tolist() == [0, 0, 0, 0]


def test_a_circle_of_a_broken_table_ends() -> None:
    made, read = step_of([1, 1], [1, 1], [8, 9], [[9], [8]])
    assert len(levels(made, [read], np.array([True, True]))) == 2


def test_a_request_says_what_its_kv_depends_on() -> None:
    picture = SimpleNamespace(mm_hash="cat", identifier="1-cat", mm_position=SimpleNamespace(offset=3, length=5))
    lora = SimpleNamespace(lora_path="/adapters/a", lora_int_id=1, lora_name="a")
    request = SimpleNamespace(lora_request=lora, cache_salt=None, mm_features=[picture])
    assert [tuple(one) for one in identity_of(request)] == [
        ("adapter", "/adapters/a", 0, 0),
        ("salt", "", 0, 0),
        ("media", "", 0, 0),
        ("media", "cat", 3, 5),
    ]
    assert [one.kind for one in identity_of(SimpleNamespace(lora_request=None, mm_features=[]))] == ["adapter", "media"]
    assert identity_of(None) == []
