"""A device that is not there ends in one clear error."""

import pytest
from click.testing import CliRunner
from kvcanary.recorder.errors import TraceError
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.executors.device.cuda import find_device, is_device_name

from ...support.places import DATA


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("cpu", True), ("cuda", True), ("cuda:0", True), ("cuda:17", True), ("cuda:", False), ("gpu", False), ("", False)],
)
def test_names(name: str, is_one: bool) -> None:
    assert is_device_name(name) is is_one


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(TraceError, match=r"built without CUDA.*--device cpu"):
        find_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TraceError, match=r"no CUDA GPU can be used here.*--device cpu"):
        find_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TraceError, match="no such GPU, this machine has cuda:0 to cuda:1"):
        find_device("cuda:7")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TraceError, match="needs torch, which is not installed"):
        find_device("cuda")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "gpu"], "is no device; expected cpu, cuda or cuda:N"),
        (["--device", "cuda", "--executor", "interval"], "runs on the CPU"),
    ],
)
def test_options_that_cannot_be(options: list[str], said: str) -> None:
    done = CliRunner().invoke(replay_command, [*options, str(DATA / "clean_llama.arrow")])
    assert done.exit_code == 2
    assert said in done.output
