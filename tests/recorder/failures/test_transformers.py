"""A failing disk under transformers' own continuous batching."""

from pathlib import Path

import pytest
from kvcanary.recorder.engines.transformers import attach

from ...support.engines.tiny_models import generate, model
from ...support.subject import assert_inconclusive, logged
from .disks import OFTEN, files_of_at_most

pytestmark = pytest.mark.usefixtures("engine_left_as_it_was")


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    subject = model("llama")
    expected = generate(subject)
    with files_of_at_most(60_000), attach(tmp_path / "t.arrow", **OFTEN) as attachment:
        assert generate(subject) == expected
    assert attachment.recorder is not None
    assert "File too large" in attachment.recorder.stats().off
    (line,) = logged(caplog)
    assert "the engine goes on" in line
    assert assert_inconclusive(tmp_path / "t.arrow").forwards > 0
