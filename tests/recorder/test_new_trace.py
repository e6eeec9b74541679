"""A trace's name that somebody has taken."""

from pathlib import Path

import pytest
from kvcanary.recorder.writing.trace_file import MAX_NAMES, begin_new


def test_the_first_name_that_is_free(tmp_path: Path) -> None:
    for name in ("t.arrow", "t-1.arrow"):
        (tmp_path / name).touch()

    def begin(path: Path) -> Path:
        path.touch(exist_ok=False)  # FileExistsError, as adapters raise it that look before they begin
        return path

    assert begin_new(tmp_path / "t.arrow", begin) == tmp_path / "t-2.arrow"


def test_it_is_not_tried_for_ever(tmp_path: Path) -> None:
    tried: list[str] = []

    def taken(path: Path) -> None:
        tried.append(path.name)
        raise FileExistsError(path)

    with pytest.raises(FileExistsError):
        begin_new(tmp_path / "t.arrow", taken)
    assert len(tried) == MAX_NAMES + 1
