"""What the adapter hooks stands in the installed SGLang's source, which is read, not imported: most of it needs a GPU."""

import ast
import importlib.util
import os
from pathlib import Path

import pytest
from kvcanary.recorder.engines.common.hooking import Target
from kvcanary.recorder.engines.sglang.hooks import TARGETS

# another version's source, unpacked: SGLANG_SOURCE=/somewhere/sglang pytest tests/recorder/sglang/test_versions.py
SOURCE = os.environ.get("SGLANG_SOURCE", "")


def source() -> Path:
    if SOURCE:
        return Path(SOURCE)
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def stands_in(root: Path, path: str) -> bool:
    """Say whether a dotted path names a function, or a class's method, that is defined there."""
    parts = path.replace(":", ".").split(".")[1:]
    for split in range(len(parts) - 1, 0, -1):
        file = root.joinpath(*parts[:split]).with_suffix(".py")
        if file.exists():
            names: list[ast.stmt] = ast.parse(file.read_text()).body
            for part in parts[split:]:
                found = [node for node in names if getattr(node, "name", None) == part]
                if not found:
                    return False
                names = getattr(found[0], "body", [])
            return True
    return False


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.hook)
def test_a_target_stands_in_the_source(target: Target) -> None:
    assert [path for path in target.paths if stands_in(source(), path)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        # the names by which the adapter looks at what it is given
        ("srt/model_executor/forward_batch_info.py", "rids: Optional[List[str]]"),
        ("srt/kv_canary/radix_cache_walker.py", "def walk_radix_cache_for_canary("),
        ("srt/kv_canary/runner/canary_manager.py", "self._outer_step_counter"),
        ("srt/kv_canary/runner/canary_manager.py", "self._sweep_orchestrator"),
        ("srt/kv_canary/runner/sweep.py", "def sweep_passes("),
        ("srt/disaggregation/decode.py", "def _commit_transfer_to_req("),
        ("srt/disaggregation/prefill.py", "def send_kv_chunk("),
        ("srt/managers/scheduler.py", "self.disagg_decode_transfer_queue"),
        ("srt/managers/cache_controller.py", "def start_writing(self) -> None:"),
        ("srt/managers/cache_controller.py", "def start_loading(self) -> int:"),
        ("srt/managers/cache_controller.py", "self.write_queue: List[CacheOperation] = []"),
        ("srt/managers/cache_controller.py", "self.load_queue: List[CacheOperation] = []"),
        ("srt/managers/cache_controller.py", "self.ack_write_queue: List[HiCacheAck] = []"),
    ],
)
def test_a_name_stands_in_the_source(file: str, text: str) -> None:
    assert text in (source() / file).read_text()


def test_a_path_that_is_not_there_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class B:\n    def c(self): ...\n")
    assert stands_in(tmp_path, "sglang.a.B.c")
    assert not stands_in(tmp_path, "sglang.a.B.d")
    assert not stands_in(tmp_path, "sglang.x.B.c")
