"""How far back the CPU's attention looks, by the window that its kernel is called with in each step."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kvcanary.recorder.engines.vllm.layout import CPU_ATTENTION, CPU_KERNEL, CPU_OPS
from kvcanary.recorder.process.settings import RecordingSettings

from ...support.one_trace import events, replayed, verdict
from .fake_engine import CONTEXT, Attention, FullAttentionSpec, GPUModelRunner, SlidingWindowSpec, hooked, serve
from .fake_scheduler import WINDOW

pytestmark = pytest.mark.usefixtures("process_goes_on")

BOTH = [SlidingWindowSpec(), FullAttentionSpec()]


def calls(monkeypatch: pytest.MonkeyPatch, window: Any) -> None:
    """Have each layer call the kernel behind a forward; `window(full, decodes, made)` is the one that it is called with."""
    ops = ModuleType(CPU_OPS)

    def kernel(query: Any, seq_lens: Any, sliding_window: Any, block_table: Any) -> None:
        pass

    setattr(ops, CPU_KERNEL, kernel)
    monkeypatch.setitem(sys.modules, CPU_OPS, ops)
    impl, before = type(CPU_ATTENTION, (Attention,), {}), GPUModelRunner._model_forward

    def cached(runner: Any, config: Any, **options: Any) -> None:
        caches(runner, config, **options)
        for group in runner.groups:
            for name in group.layer_names:
                runner.layers[name].impl = own = impl()
                own.sliding_window = getattr(group.kv_cache_spec, "sliding_window", -1)

    def forward(runner: Any, *args: Any, **kwargs: Any) -> None:
        before(runner, *args, **kwargs)
        for name, layer in runner.layers.items():
            made, given = layer.impl.sliding_window, CONTEXT.attn_metadata[name]
            decodes = int(given.query_start_loc[-1]) == len(given.seq_lens)
            asked = window(made < 0, decodes, made)
            getattr(ops, CPU_KERNEL)(None, given.seq_lens, sliding_window=asked, block_table=given.block_table)

    caches = GPUModelRunner.initialize_kv_cache
    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", cached)
    monkeypatch.setattr(GPUModelRunner, "_model_forward", forward)


def test_a_kernel_that_is_called_with_the_window_is_watched_and_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls(monkeypatch, lambda _full, _decodes, made: made)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(BOTH, num_blocks=60)
    header, told = events(tmp_path)
    assert {event.scalar("window_watched") for event in told if event.kind == "forward"} == {1}
    assert not any("window" in entry.name for entry in header.not_watched)
    assert verdict(tmp_path).verdict.value == "clean"


@pytest.mark.parametrize(
    ("window", "of"),
    [
        (lambda full, decodes, made: -1 if decodes else made, "swa"),
        (lambda full, decodes, made: made - 2 if decodes and not full else made, "swa"),
        (lambda full, decodes, made: WINDOW if decodes else made, "full"),
    ],
)
def test_a_call_with_another_window_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Any, of: str
) -> None:
    calls(monkeypatch, window)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(BOTH, num_blocks=60)
    summary, header, told = replayed(tmp_path)
    assert summary.findings_by_kind.keys() == {"wrong_window"}
    groups = {header.groups[group].name for event in told for group in event.ints("window_group").tolist()}
    assert groups == {of}


def test_of_a_kernel_that_is_not_called_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls(monkeypatch, lambda _full, _decodes, _made: None)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve([SlidingWindowSpec()])
    _, told = events(tmp_path)
    assert {event.scalar("window_watched") for event in told if event.kind == "forward"} == {0}
    assert verdict(tmp_path).verdict.value == "clean"
