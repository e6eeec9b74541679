"""A report folder that came with a trace: nothing in it becomes code, an answer or a file of whoever looks at it."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner
from kvcanary.analysis.cli.sql import sql_command
from kvcanary.analysis.errors import AnalysisError, SqlError
from kvcanary.analysis.incidents.finding import find_incidents, incidents_fit, read_incidents, write_incidents
from kvcanary.analysis.page.build import build_page
from kvcanary.analysis.store.output import write_result
from kvcanary.analysis.store.session import open_report, open_sources
from kvcanary.analysis.store.sources import find_sources, read_summary
from kvcanary.analysis.store.store import build_store, fresh_store

from ..support.page_reports import source_of


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("the victim's own words")
    return path


def poisoned(store: Path, secret: Path, table: str) -> None:
    """Put a view over a file in place of one of a store's tables."""
    with duckdb.connect(str(store)) as connection:
        columns = connection.execute(f"select * from {table} limit 0").description
        names = [column[0] for column in columns]
        connection.execute(f"drop table {table} cascade")
        text = f"(select content from read_text('{secret}'))"
        cells = ", ".join(f'{text} as "{name}"' for name in names)
        connection.execute(f"create view {table} as select {cells}")


def test_a_store_that_came_along_is_not_opened(report, secret):
    source = source_of(report("table_swap"))
    store = build_store(source)
    assert fresh_store(source) == store
    copy = store.with_name("copy")
    shutil.copy2(store, copy)  # as an archive would put it there: same bytes, same dates
    copy.replace(store)
    assert fresh_store(source) is None
    build_store(source)
    poisoned(store, secret, "traces")
    assert fresh_store(source) is None
    with open_sources([source]) as session:
        assert not session.stored
        assert "victim" not in str(session.sql("from traces").to_pylist())


def test_a_log_beside_a_store_is_not_applied(report):
    source = source_of(report("table_swap"))
    store = build_store(source)
    store.with_name("report.duckdb.wal").write_bytes(b"anything")
    assert fresh_store(source) is None


@pytest.mark.parametrize("stored", [False, True])
def test_sql_reaches_what_was_opened_and_no_more(report, secret, tmp_path, stored):
    folder = report("table_swap")
    source = source_of(folder)
    if stored:
        build_store(source)
    with open_sources([source]) as session:
        assert session.stored == stored
        assert session.sql("select count(*) as n from violations")["n"].to_pylist() == [36]
        for query in (
            f"select * from read_text('{secret}')",
            f"copy (select 1) to '{tmp_path / 'made.csv'}'",
            f"attach '{tmp_path / 'made.duckdb'}' as other",
            "set memory_limit = '1TB'",
            "install httpfs",
        ):
            with pytest.raises(SqlError, match=r"disabled by configuration|has been locked"):
                session.sql(query)
    with open_report(folder, unlocked=True) as session:
        assert session.sql(f"select content from read_text('{secret}')")["content"].to_pylist()


def test_who_asks_for_another_file_is_told_the_way(report, secret):
    done = CliRunner().invoke(sql_command, [str(report("table_swap")), f"select * from read_text('{secret}')"])
    assert done.exit_code == 2
    assert "--unlocked" in done.stderr


def test_a_pipe_or_a_link_in_a_files_place_is_refused_and_nothing_hangs(report, secret):
    folder = report("table_swap")
    violations = folder / "violations.parquet"
    violations.unlink()
    violations.symlink_to(secret)
    with pytest.raises(AnalysisError, match="no regular file"):
        open_report(folder)
    (folder / "summary.json").unlink()
    os.mkfifo(folder / "summary.json")
    with pytest.raises(AnalysisError, match="not a regular file"):
        read_summary(folder)


def test_no_page_and_no_store_is_written_into_a_folder_with_links(report, secret):
    folder = report("table_swap")
    (folder / "report.html").symlink_to(secret)
    [source] = find_sources([folder])
    for make in (build_store, build_page):
        with pytest.raises(AnalysisError, match=r"holds 'report.html', which kvcanary did not write"):
            make(source)
    assert secret.read_text() == "the victim's own words"


@pytest.mark.parametrize("name", ["violations", "incidents"])
def test_a_column_whose_name_is_no_text(report, name):
    folder = report("table_swap")
    write_incidents(folder, find_incidents(folder, [folder.with_suffix(".arrow")]))
    assert incidents_fit(folder)
    path = folder / f"{name}.parquet"
    path.write_bytes(path.read_bytes().replace(b"request", b"reques\x80"))
    assert not incidents_fit(folder)
    assert read_incidents(folder) is None
    if name == "violations":
        with pytest.raises(AnalysisError, match=r"violations.parquet: no Parquet file of a report"):
            find_incidents(folder, [])


def test_cells_of_csv_do_not_steer_a_terminal():
    table = pa.table({"a\x1b[2J": ["\x1b]0;x\x07", "plain"]})
    for on_screen in (True, False):
        sink = io.BytesIO()
        write_result(table.to_reader(), sink, "csv", max_rows=None, on_screen=on_screen)
        assert (b"\x1b" not in sink.getvalue()) == on_screen
        assert len(list(csv.reader(io.StringIO(sink.getvalue().decode())))) == 3


def test_the_page_carries_the_licences_of_what_it_carries(report):
    [source] = find_sources([report("table_swap")])
    page = build_page(source).read_text()
    assert "University of Washington Interactive Data Lab" in page
    assert json.loads((source.report / "summary.json").read_text())["verdict"] == "corrupt"
