"""`kvcanary diff`: exit codes, what is printed, and clear words for wrong input."""

import json

import pytest
from click.testing import CliRunner
from kvcanary.cli import main

from ...support.places import DATA

GOOD, BAD = DATA / "clean_llama.arrow", DATA / "table_swap.arrow"
OLD, OTHER = DATA / "versions" / "sglang_0.5.16.arrow", DATA / "versions" / "transformers_5.23.0.arrow"


def run(*words, code):
    done = CliRunner().invoke(main, ["diff", *map(str, words)], prog_name="kvcanary")
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout if "--json" in words else done.output


def test_for_people():
    said = run(GOOD, BAD, code=1)
    assert "DIFFERENT   1 of 8 requests   table 1" in said
    assert "aligned by id: 8 requests of 8 and 8" in said
    assert "B reads position 40 in slot 608, which holds position 40 of request shared-b" in said
    assert f"next   kvcanary-replay {BAD}" in said
    timing = run("--no-kv", OTHER, OLD, code=0)
    assert "SAME   no request differs, but for the timing below" in timing
    assert "prefix hits of 2 requests" in timing
    assert run("-q", GOOD, GOOD, code=0).startswith("SAME")


def test_for_scripts():
    found = json.loads(run("--json", GOOD, BAD, code=1))
    assert found["first"]["kind"] == "table"
    assert found["first"] == found["requests"][0][0]
    assert found["counts"] == {"table": 1}
    assert found["timing"]["same"]
    assert found["compared"] == {"tokens": 451, "sampled": 204, "kv": 451}
    refused = json.loads(run("--json", GOOD, DATA / "clean_hybrid.arrow", code=125))
    assert refused["verdict"] == "not comparable"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--ignore", "table"], 0),
        (["--only", "table"], 1),
        (["--only", "kv,sampled"], 0),
        (["--requests", "long"], 1),
        (["--requests", "short,one-token"], 0),
        (["--align", "prompt"], 1),
        (["--strict"], 1),
        (["--kv-tolerance", "0"], 1),
    ],
)
def test_what_counts(words, code):
    run(*words, GOOD, BAD, code=code)


def test_only_the_requests_asked_for_are_counted():
    said = run("--requests", "long,short,nobody", GOOD, BAD, code=1)
    assert "aligned by id: 2 requests of 2 and 2" in said
    assert "DIFFERENT   1 of 2 requests   table 1" in said
    assert "note  --requests: neither trace has a request nobody" in said
    found = json.loads(run("--json", "--requests", "short,", GOOD, BAD, code=0))
    assert found["notes"] == []
    assert (found["align"]["a_requests"], found["align"]["pairs"]) == (1, 1)


def test_a_torn_trace_is_no_clean_bill(tmp_path):
    torn = tmp_path / "torn.arrow"
    torn.write_bytes(GOOD.read_bytes()[: GOOD.stat().st_size * 2 // 3])
    said = run(GOOD, torn, code=125)
    assert "INCONCLUSIVE" in said
    assert "torn" in said
    torn.write_bytes(BAD.read_bytes()[: BAD.stat().st_size - 500])
    assert "DIFFERENT" in run(GOOD, torn, code=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([GOOD, "/no/such.arrow"], "no such file"),
        ([GOOD, DATA / "README.md"], "not a kvcanary trace"),
        (["--requests", "nobody", GOOD, BAD], "neither trace has a request nobody"),
        (["--requests", ",", GOOD, BAD], "--requests names none"),
        (["--only", "", GOOD, BAD], "no kind ''; there are missing, input"),
        (["--only", "tabel", GOOD, BAD], "no kind 'tabel'; there are missing, input"),
        (["--only", "kv", "--ignore", "table", GOOD, BAD], "--only goes without"),
        (["--no-kv", "--kv-tolerance", "1", GOOD, BAD], "exclude one another"),
        (["--no-kv", "--only", "kv", GOOD, BAD], "nothing is left to compare"),
        (["--kv-tolerance", "nan", GOOD, BAD], "--kv-tolerance is nan, expected a number"),
        (
            [
                "--ignore",
                "missing,input,identity,position,table,window,state,values,sampled,kv,layer,kv_changed,layer_changed,length",
                GOOD,
                BAD,
            ],
            "nothing is left",
        ),
    ],
)
def test_wrong_input_is_said(words, expected):
    assert expected in run(*words, code=2)


def test_a_whole_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert "set TMPDIR" in run(GOOD, BAD, code=2)
