"""docs/reference/sql.md and the example beside it: every statement runs, every relation and macro has its line."""

import re

import pytest
from kvcanary.analysis import open_report
from kvcanary.analysis.store.library import BASE, DERIVED

from ..support.places import DOCS

TEXT = (DOCS / "reference" / "sql.md").read_text()
STATEMENTS = [
    statement.strip()
    for block in re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)
    for statement in block.split(";\n")
    if statement.strip()
]


def test_every_relation_and_macro_has_a_line_and_an_example():
    rows = "\n".join(line for line in TEXT.splitlines() if line.startswith("| `"))
    asked = "\n".join(STATEMENTS)
    for name in [*BASE, *(name for _, name in DERIVED)]:
        assert re.search(rf"`{name}[`(]", rows), name
        assert re.search(rf"\b{name}\b", asked), name


@pytest.mark.parametrize(("trace", "least"), [("table_swap", 20), ("kv_flip_sliding", 20)])
def test_every_example_runs(report, trace, least):
    answered = 0
    with open_report(report(trace)) as session:
        for statement in STATEMENTS:
            answered += bool(session.sql(statement).num_rows)
    assert answered >= least


def test_the_examples_find_what_they_say(report):
    def of(start):
        return next(statement for statement in STATEMENTS if statement.startswith(start))

    with open_report(report("position_plus_one")) as session:
        assert session.sql(of("select forward, request_id, table_position")).num_rows
    with open_report(report("token_swap")) as session:
        swapped = session.sql(of("select tokens.forward")).to_pylist()
        assert [(row["forward"], row["fed"], row["sampled"]) for row in swapped] == [(15, 48, 490), (15, 490, 48)]
    with open_report(report("table_swap")) as session:
        assert session.sql(of("select slot, writer_request")).to_pylist()[0]["writer_request"] == "shared-b"
        assert session.sql(of("select hit.forward")).num_rows


def test_python_from_the_docs(report, monkeypatch, capsys):
    folder = report("table_swap")
    monkeypatch.chdir(folder.parent)
    folder.rename(folder.parent / "trace.report")
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(code, names)
    assert names["spread"].num_rows == 1
    assert names["frame"]["found"].sum() == 36
    assert sum(map(int, capsys.readouterr().out.split())) == 451
