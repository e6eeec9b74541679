"""The command that writes a page, the replay that leaves one, and the plot library that both need."""

import errno
import json
import os
import resource
import shutil
import stat
import sys

import pytest
from kvcanary.analysis import finishing
from kvcanary.analysis.errors import AnalysisError
from kvcanary.analysis.page import build
from kvcanary.analysis.page.build import build_page
from kvcanary.analysis.store.store import build_store

from ..support.commands import run
from ..support.page_reports import data_of, source_of
from ..support.places import DATA

LIBRARY = "window.vegaEmbed = null;"  # which takes seconds to make


def test_the_command(report):
    folder = report("kv_flip")
    (folder.parent / "empty").mkdir()
    assert run("page", folder.parent / "empty").stderr.startswith("Error: ")
    done = run("page", folder, "--json")
    made = json.loads(done.stdout)
    assert (done.returncode, made["page"]) == (0, str(folder / "report.html"))
    assert stat.S_IMODE((folder / "report.html").stat().st_mode) == 0o600
    assert (folder / "report.html").stat().st_size == made["bytes"]
    elsewhere = run("page", folder, "-o", folder.parent / "no" / "where.html")
    assert (elsewhere.returncode, "no such folder" in elsewhere.stderr) == (2, True)
    folder_itself = run("page", folder, "-o", folder)
    assert (folder_itself.returncode, "is a directory" in folder_itself.stderr) == (2, True)


def test_half_a_page_does_not_stay(report, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "plot_library", lambda: LIBRARY)
    source = source_of(report("kv_flip"))
    build_store(source)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # as a disk that is full
    try:
        with pytest.raises(AnalysisError, match="cannot be written"):
            build_page(source, tmp_path / "page.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_opened_stays(report, tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(build, "plot_library", lambda: LIBRARY)
    monkeypatch.setattr(build, "private_output", refused)
    (tmp_path / "page.html").write_text("another user's")
    with pytest.raises(AnalysisError, match="Permission denied"):
        build_page(source_of(report("kv_flip")), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "another user's"


def test_without_the_plot_library_the_command_says_how_to_get_it(report, monkeypatch):
    from kvcanary.analysis.errors import NoPlotLibraryError

    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(NoPlotLibraryError, match=r"pip install 'kvcanary\[replay\]'"):
        build_page(source_of(report("kv_flip")))


def test_a_corrupt_replay_leaves_its_page_and_a_clean_one_none(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "plot_library", lambda: "")
    trace = shutil.copy(DATA / "table_swap.arrow", tmp_path / "trace.arrow")
    page = tmp_path / "trace.report" / "report.html"
    assert run("replay", "--no-page", trace).returncode == 1
    assert not page.exists()
    done = run("replay", trace)
    assert (done.returncode, page.exists()) == (1, True)
    assert str(page.name) in done.stdout
    assert data_of(page.read_text())["subjects"]["are_incidents"]
    assert run("replay", "--quiet", trace).returncode == 1
    assert not page.exists()  # an older page would tell of another replay
    assert run("replay", "--json", "--page", trace).returncode == 1
    assert page.exists()
    shutil.copy(DATA / "clean_llama.arrow", trace)
    assert run("replay", trace).returncode == 0
    assert not page.exists()


def test_a_replay_without_the_plot_library_says_so_and_judges(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    trace = shutil.copy(DATA / "kv_flip.arrow", tmp_path / "trace.arrow")
    done = run("replay", trace)
    assert done.returncode == 1
    assert "no report.html: the page needs vl-convert-python" in done.stderr.replace("\n", " ")


def test_a_replay_of_very_many_tokens_leaves_the_page_for_later(tmp_path, monkeypatch):
    monkeypatch.setattr(finishing, "MAX_TOKENS_AT_ONCE", 400)
    trace = shutil.copy(DATA / "kv_flip.arrow", tmp_path / "trace.arrow")
    done = run("replay", trace)
    assert done.returncode == 1
    assert "no report.html yet: 451 tokens" in done.stderr
    assert not (tmp_path / "trace.report" / "report.html").exists()


def test_the_plot_library_is_kept_and_made_anew_where_it_is_not_whole(tmp_path, monkeypatch):
    import vl_convert
    from kvcanary.analysis.page.build import plot_library

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda _: "made once")
    assert plot_library() == "made once"
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda _: "made anew")
    assert plot_library() == "made once"
    (kept,) = (tmp_path / "kvcanary").iterdir()
    kept.write_text(kept.read_text()[:-1])
    assert plot_library() == "made anew"
    kept.unlink()
    (tmp_path / "kvcanary").chmod(0o500)
    assert plot_library() == "made anew"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kvcanary" / "file"))
    assert plot_library() == "made anew"
