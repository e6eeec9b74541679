"""`kvcanary sql` as a user meets it: formats, sources, errors, exit codes, the prompt."""

import csv
import io
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis import open_traces
from kvcanary.analysis.cli.prompt import View, completions
from kvcanary.analysis.cli.prompt import converse as answer_statements

from ..support.commands import run
from ..support.hand_made import write

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all

HEAVY = {"torch", "numba", "polars", "duckdb", "pyarrow", "numpy", "rich"}


@pytest.mark.parametrize("command", ["sql", "triage"])
def test_help_has_examples_and_loads_nothing(command):
    code = f"import sys\nfrom kvcanary.cli import main\ntry:\n main(['{command}', '--help'])\nexcept SystemExit:\n pass\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, modules = done.stdout.split("MODULES")
    assert "Examples:" in text
    assert "Exit codes" in text
    assert not HEAVY & set(modules.split())


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path / "trace.arrow")


QUERY = "select forward, mode, list(num_tokens) as n, null as nothing, time_ns > 0 as late from forwards group by all order by 1"


def test_formats(trace, tmp_path):
    done = run("sql", trace, QUERY)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == ["forward", "mode", "n", "nothing", "late"]
    assert done.stdout.splitlines()[2].split() == ["0", "extend", "[4]", "yes"]
    assert done.stdout.splitlines()[-1] == "(3 rows)"
    rows = list(csv.reader(io.StringIO(run("sql", trace, QUERY, "--format", "csv").stdout)))
    assert rows == [["forward", "mode", "n", "nothing", "late"], ["0", "extend", "[4]", "", "True"],
                    ["1", "mixed", "[4]", "", "True"], ["2", "decode", "[1]", "", "True"]]  # fmt: skip
    expected = [
        {"forward": f, "mode": mode, "n": [n], "nothing": None, "late": True}
        for f, mode, n in [(0, "extend", 4), (1, "mixed", 4), (2, "decode", 1)]
    ]
    assert json.loads(run("sql", trace, QUERY, "--format", "json").stdout) == expected
    assert json.loads(run("sql", trace, "from gaps", "--format", "json").stdout) == []
    out = tmp_path / "o.parquet"
    assert run("sql", trace, QUERY, "--format", "parquet", "-o", out).returncode == 0
    assert pq.read_table(out).to_pylist() == expected
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    piped = run("sql", trace, QUERY, "--format", "arrow")
    assert pa.ipc.open_file(piped.raw).read_all().to_pylist() == expected


LATE = "select case when range = 350000 then error('too late') else range end as a from range(400000)"


@pytest.mark.parametrize("form", ["table", "csv", "json", "parquet", "arrow"])
def test_a_query_that_fails_under_way_says_so_and_spares_the_file_that_was_there(trace, tmp_path, form):
    out = tmp_path / "o"
    out.write_text("of yesterday")
    done = run("sql", trace, LATE, "--format", form, "-o", out)
    assert (done.returncode, "Error: Invalid Input Error: too late" in done.stderr) == (2, True)
    assert "cannot be written" not in done.stderr
    assert out.read_text() == "of yesterday"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_half_a_result_in_a_pipe_never_looks_whole(trace, form):
    done = run("sql", trace, LATE, "--format", form)
    assert done.returncode == 2
    with pytest.raises(pa.ArrowException):
        (pq.read_table if form == "parquet" else pa.ipc.open_file)(io.BytesIO(done.raw))


def test_a_link_stays_and_half_a_result_behind_it_goes(trace, tmp_path):
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    assert run("sql", trace, "select 1 as a", "-o", link).returncode == 0
    assert file.read_text().splitlines()[0] == "a"
    assert run("sql", trace, LATE, "--format", "csv", "-o", link).returncode == 2
    assert (link.is_symlink(), file.read_bytes()) == (True, b"")


def test_a_file_that_others_could_read_is_this_users_afterwards(trace, tmp_path):
    out = tmp_path / "o.csv"
    out.touch(0o644)
    assert run("sql", trace, "from tokens", "--format", "csv", "-o", out).returncode == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "query",
    [
        "select count(*) from range(1000000000) a, range(1000000000) b where a.range * b.range = 7",  # no first row
        "from range(100000000000)",  # rows without end
    ],
)
def test_ctrl_c_ends_a_query_wherever_it_is_and_leaves_no_file(trace, tmp_path, query):
    code = """
import sys
from kvcanary.analysis.store import session
from kvcanary.cli import kvcanary_main
begun = session.SqlSession._begin
session.SqlSession._begin = lambda self, query: (print("begun", flush=True) if "range" in query else 0, begun(self, query))[1]
kvcanary_main()
"""
    out = tmp_path / "o.csv"
    out.write_text("of yesterday")
    command = [sys.executable, "-c", code, "sql", trace, query, "--format", "csv", "-o", out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        time.sleep(2)  # DuckDB looks for a signal at first, and then no longer
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate()
        finally:
            process.kill()
    assert (process.returncode, said.splitlines()[-1]) == (130, "interrupted")
    assert out.read_text() == "of yesterday"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_json_is_json_and_loses_no_column(trace):
    query = "select 1 as x, 2 as x, 3 as x_1, 'nan'::double as n, [1 / 0, 2] as l, {'a': '-inf'::double} as s"
    text = run("sql", trace, query, "--format", "json").stdout
    expected = [{"x": 1, "x_2": 2, "x_1": 3, "n": None, "l": [None, 2.0], "s": {"a": None}}]
    assert json.loads(text, parse_constant=pytest.fail) == expected


def test_losses_are_told_whatever_the_format(trace):
    for form in ("table", "csv", "json"):
        done = run("sql", trace, "select 1 as a", "--format", form)
        assert "4 event(s) lost while recording" in done.stderr
    assert "lost" not in run("sql", trace, "select 1 as a", "--format", "csv").stdout


def test_sql_from_a_file_and_from_a_pipe(trace, tmp_path):
    script = tmp_path / "q.sql"
    script.write_text("-- two statements\nselect 1 as a;\nselect count(*) as n from tokens;\n")
    expected = [{"n": 7}]
    assert json.loads(run("sql", trace, "-f", script, "--format", "json").stdout) == expected
    assert json.loads(run("sql", trace, "-f", "-", "--format", "json", stdin=script.read_text()).stdout) == expected
    assert json.loads(run("sql", trace, "--format", "json", stdin=script.read_text()).stdout) == expected


def test_nothing_is_cut_unless_it_is_asked_for(trace):
    query = "select unnest(range(150)) as i, repeat('x', 200) || i as long"
    assert "(150 rows, 100 shown; --rows 0 shows all)" in run("sql", trace, query, "--rows", 100).stdout
    piped = run("sql", trace, query).stdout
    assert "(150 rows)" in piped
    assert f"{'x' * 200}149" in piped
    assert len(run("sql", trace, query, "--format", "csv").stdout.splitlines()) == 151
    narrow = run("sql", trace, query, "--width", 30).stdout.splitlines()
    assert max(map(len, narrow)) == 30
    assert narrow[-2] == "149  xxxxxxxxxxx...xxxxxxxx149"
    assert len({*narrow}) == len(narrow)


def test_columns_that_do_not_fit_follow_with_their_rows_numbered(trace):
    lines = run("sql", trace, "from tokens order by event, position", "--width", 60).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    heads = [number for number, line in enumerate(lines) if line.startswith("#")]
    assert len(heads) > 1
    assert [lines[at + 2].split()[0] for at in heads] == ["1"] * len(heads)
    names = {name for at in heads for name in lines[at].split()}
    assert {"forward", "request", "slot", "trace"} <= names
    expanded = run("sql", trace, "from tokens order by event, position limit 1", "-x").stdout.splitlines()
    assert expanded[:2] == ["-- row 1 --", "event           3"]
    assert expanded[-2:] == ["trace           trace", "(1 row)"]


def test_tabs_and_json(trace):
    query = """select 'a' || chr(9) || 'b' as x, null as y, [1, 2] as z, 'c\\d' as w"""
    assert run("sql", trace, query, "--format", "tab").stdout == "x\ty\tz\tw\na\\tb\t\t[1, 2]\tc\\\\d\n"
    assert json.loads(run("sql", trace, "select 1 as a", "--json").stdout) == [{"a": 1}]


def test_a_pipe_may_hold_what_is_typed_at_a_prompt(trace):
    done = run("sql", trace, stdin="select 1 as one;\n\\x\n\nselect 2\n  as two;\\\n".replace(";\\\n", ""))
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "one",
        "-" * 3,
        "  1",
        "(1 row)",
        "expanded is on",
        "-- row 1 --",
        "two  2",
        "(1 row)",
    ]
    done = run("sql", trace, stdin="select 1 as one;\nnonsense;\nselect 3 as three;")
    assert (done.returncode, "three" in done.stdout) == (2, False)


def test_names_from_a_trace_cannot_steer_the_terminal(trace):
    done = run("sql", trace, "select chr(27) || '[31mred' as a")
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mred" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["TRACE", "select nonsense from tokens"], 'Referenced column "nonsense" not found'),
        (["TRACE", "selec 1;"], "syntax error"),
        (["TRACE", "select error('stop here')"], "stop here"),
        (["TRACE", ""], "is empty"),
        (["TRACE", "gone.arrow"], "gone.arrow: no such file or folder"),
        (["gone.arrow"], "gone.arrow: no such file or folder"),
        (["TRACE", "-f", "gone.sql"], "gone.sql: cannot be read"),
        (["TRACE", "select 1 as a", "-o", "/no/such/folder/x"], "/no/such/folder/x: cannot be written"),
        (["TRACE", "select 1 as a", "-f", "x.sql"], "exclude one another"),
        (["TRACE", "--save"], "no report beside it"),
        (["TRACE", "--trace", "x", "select 1 as a"], "--trace goes with one report folder"),
        ([], "Missing argument"),
    ],
)
def test_errors_have_exit_code_2_and_no_traceback(trace, arguments, message):
    done = run("sql", *[trace if a == "TRACE" else a for a in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_asked_is_not_overwritten_by_the_answer(trace, report, tmp_path):
    folder = report("table_swap")
    link = tmp_path / "link.arrow"
    link.symlink_to(trace)
    asked = [(trace, trace), (trace, link), (folder, folder / "violations.parquet"), (folder, folder / "summary.json")]
    commands = [("sql", source, "select 1 as one", "--format", "csv", "-o", target) for source, target in asked]
    for command in (*commands, ("page", folder, "-o", folder / "violations.parquet")):
        before = command[-1].read_bytes()
        done = run(*command)
        assert (done.returncode, "is made of this file" in done.stderr) == (2, True)
        assert command[-1].read_bytes() == before
    script = tmp_path / "q.sql"
    script.write_text("select 1 as one")
    assert run("sql", folder, "-f", script, "--format", "csv", "-o", script).returncode == 2
    assert script.read_text() == "select 1 as one"
    answer = folder / "answer.csv"
    for _ in range(2):
        assert run("sql", folder, "select 1 as one", "--format", "csv", "-o", answer).returncode == 0


def test_save(report):
    folder = report("table_swap")
    done = run("sql", folder, "--save")
    assert (done.returncode, done.stdout) == (0, "")
    assert (folder / "report.duckdb").is_file()
    assert json.loads(run("sql", folder, "select count(*) as n from tokens", "--format", "json").stdout) == [{"n": 451}]
    assert "raw_events does not exist" in run("sql", folder, "from raw_events").stderr
    live = run("sql", folder, "select count(*) as n from raw_events", "--live", "--format", "json")
    assert json.loads(live.stdout) == [{"n": 116}]


def test_a_report_without_its_trace_says_so(report, tmp_path):
    folder = report("table_swap")
    (tmp_path / "table_swap.arrow").unlink()
    done = run("sql", folder, "select count(*) as n from violations", "--format", "json")
    assert json.loads(done.stdout) == [{"n": 36}]
    assert "not at hand" in done.stderr
    assert "--trace" in done.stderr


class Typist:
    """Types lines at a prompt; an exception is raised instead of typed."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.prompts = []

    def __call__(self, prompt):
        self.prompts.append(prompt.strip())
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, type):
            raise line
        return line


def converse(trace, *lines):
    said = []
    with open_traces(trace) as session:

        def show(query):
            said.append(session.sql(query).to_pylist())

        typist = Typist(*lines)
        answer_statements(session, View(), show=show, read=typist, write=said.append)
    return said, typist.prompts


def test_the_prompt(trace):
    said, prompts = converse(trace, "select 1", "", "  as a;", "", "nonsense;", "select 2 as b;", r"\q", "never")
    assert said[0] == [{"a": 1}]
    assert "syntax error" in said[1]
    assert said[2:] == [[{"b": 2}]]
    assert prompts == ["kvcanary>", "...>", "...>", "kvcanary>", "kvcanary>", "kvcanary>", "kvcanary>"]


def test_the_prompt_is_interrupted_and_asked_what_there_is(trace):
    said, _ = converse(trace, "select 1", KeyboardInterrupt, "select 3 as c;", r"\d", r"\d losses", r"\?")
    assert said[1] == [{"c": 3}]
    assert any(isinstance(line, str) and line.startswith("tokens ") for line in said)
    assert [row["column_name"] for row in next(x for x in said[2:] if isinstance(x, list))][:2] == ["event", "time_ns"]
    assert any("list relations" in str(line) for line in said)


def test_an_error_is_one_clear_line(trace):
    said, _ = converse(trace, "select", "nonsense from losses;", "from nowhere;", "select 1", "  2 3;")
    assert said[0].startswith(
        'Binder Error: Referenced column "nonsense" not found in FROM clause! Candidate bindings: '
    )
    assert said[1] == "Catalog Error: Table with name nowhere does not exist!"  # and nothing that only we know of
    assert said[2] == 'Parser Error: syntax error at or near "2" (line 2)'


def test_the_prompt_switches_how_answers_are_shown(trace):
    said, _ = converse(trace, r"\x", r"\timing", "select 1 as a;", r"\timing off", r"\x on", r"\z")
    assert said[:2] == ["expanded is on", "timing is on"]
    assert said[3].endswith(" s")
    assert said[4:6] == ["timing is off", "expanded is on"]
    assert said[6].startswith(r"no command \z")


def test_the_prompt_tells_what_a_macro_does(trace):
    said, _ = converse(trace, r"\d blast_radius")
    assert said[0].startswith("blast_radius(incident := 0, from_forward := 0): how far damage spread")


def test_completion_knows_every_relation_macro_and_column(trace):
    with open_traces(trace) as session:
        words = session.words()
    assert {
        "select",
        "incidents",
        "incident_requests",
        "incident_members",
        "blast_radius",
        "confidence",
        "sentence",
    } <= {*words}


def test_completion():
    words = ["forward", "forwards", "tokens"]
    assert completions(words, "FOR") == [("forward", 3), ("forwards", 3)]
    assert completions(words, "t.tok") == [("tokens", 3)]


def test_the_prompt_on_a_terminal_keeps_its_history(trace, tmp_path):
    controller, terminal = pty.openpty()
    code = "from kvcanary.cli import kvcanary_main; kvcanary_main()"
    environment = os.environ | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "TERM": "xterm",
    }
    process = subprocess.Popen([sys.executable, "-c", code, "sql", str(trace)], stdin=terminal, stdout=terminal,
                               stderr=terminal, env=environment)  # fmt: skip
    os.close(terminal)
    os.write(controller, b"select 40\r + 2 as answer;\r\\q\r")
    said = b""
    while process.poll() is None or b"answer" not in said:
        try:
            said += os.read(controller, 4096)
        except OSError:  # the terminal is closed
            break
    os.close(controller)
    assert process.wait(60) == 0
    assert b"42" in said
    history = tmp_path / "state" / "kvcanary" / "sql_history"
    assert "+select 40\n+ + 2 as answer;\n" in history.read_text()  # a statement of two lines is one in the history
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_too_little_address_space_is_one_error_and_no_crash(trace):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))"
    code = f"{limit}; from kvcanary.cli import kvcanary_main; kvcanary_main()"
    words = [sys.executable, "-c", code, "sql", str(trace), "from forwards"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done
    [line] = done.stderr.splitlines()
    assert "this process may have 2.0 GiB: allow it ulimit -v" in line
