"""What several tests of the adapter share."""

import pytest
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang import layout as sglang_layout
from kvcanary.recorder.engines.sglang import opening as sglang_opening
from kvcanary.recorder.engines.sglang import recording as sglang_recording


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the adapter take the engine's tensors, which lie in memory, for a GPU's."""
    monkeypatch.setattr(sglang_attachment.SglangAttachment, "end_with_process", lambda _: None)
    monkeypatch.setattr(sglang_attachment, "not_applied", list)
    for module in (sglang_layout, sglang_opening, sglang_recording):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
