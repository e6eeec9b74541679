"""A handful of kills of the series in tests/soak."""

from pathlib import Path

from ..support.killed.kill_series import OPTIONS, Victims


def test_an_engine_that_is_killed_leaves_all_that_was_flushed(tmp_path: Path) -> None:
    with Victims() as victims:
        for number, mode in enumerate([*OPTIONS, "segments"]):
            folder = tmp_path / str(number)
            folder.mkdir()
            victims.kill_one(folder, mode=mode, seed=number)
