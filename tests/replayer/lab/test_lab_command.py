"""`kvcanary lab`: list, run, and the matrix with its results file."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.trace_file import TraceFile
from kvcanary.replayer.cli.lab import lab_command
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.lab import matrix
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.matrix import Row

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all


def run(*arguments, command=lab_command):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def marks(path):
    with TraceReader(path) as reader:
        events = [view for batch in reader.stream() for view in batch if view.kind == "mark"]
        return [(str(view.scalar("note")), json.loads(str(view.scalar("labels")))) for view in events]


def test_list():
    text = run("list").stdout
    for name in [*FAULTS, *CONFIGURATIONS]:
        assert name in text
    told = json.loads(run("list", "--json").stdout)
    assert [fault["name"] for fault in told["faults"]] == list(FAULTS)
    assert {fault["name"] for fault in told["faults"] if fault["benign"]} == {
        "dedup_remap",
        "duplicate_prompt_numerics",
    }
    assert {fault["family"] for fault in told["faults"]} >= {"allocation", "transfer", "kv_bytes"}
    assert [config["name"] for config in told["configurations"]] == list(CONFIGURATIONS)


def test_run_leaves_the_ground_truth_in_the_trace(tmp_path):
    path = tmp_path / "trace.arrow"
    result = run("run", "--fault", "req_to_token", "--seed", 3, "-o", path)
    assert result.exit_code == 0
    assert "broke   req_to_token before forward" in result.stdout
    assert "effect  wrong content in forward" in result.stdout
    ((note, labels),) = marks(path)
    assert note == "fault injected"
    assert labels["fault"] == "req_to_token"
    assert f"position {labels['position']}" in result.stdout
    assert run("--no-report", "--quiet", path, command=replay_command).exit_code == 1


def test_run_tells_the_same_again_as_json(tmp_path):
    told = []
    for name in ("one", "two"):
        result = run(
            "run", "--fault", "free_too_early", "--config", "swa", "--seed", 5, "-o", tmp_path / name, "--json"
        )
        told.append(json.loads(result.stdout))
        assert told[-1].pop("traces") == [str(tmp_path / name)]
    assert told[0] == told[1]
    assert told[0]["injected"]["forward"] <= told[0]["effect"]["forward"] < told[0]["forwards"]


def test_run_of_a_pair_writes_both_traces(tmp_path):
    result = run("run", "--fault", "transfer_wrong_stride", "-o", tmp_path / "pair")
    assert result.exit_code == 0
    paths = [tmp_path / "pair" / name for name in ("prefill.arrow", "decode.arrow")]
    assert [marks(path)[0][1]["side"] for path in paths] == ["decode", "decode"]
    assert f"kvcanary-replay {paths[0]} {paths[1]}" in result.stdout


def test_run_of_a_clean_engine(tmp_path):
    result = run("run", "--fault", "clean", "--config", "mla", "-o", tmp_path / "trace.arrow")
    assert result.exit_code == 0
    assert "broke" not in result.stdout
    assert marks(tmp_path / "trace.arrow") == []
    assert run("--no-report", "--quiet", tmp_path / "trace.arrow", command=replay_command).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--fault", "nonsense"), "no fault 'nonsense'; see kvcanary lab list"),
        (("run", "--fault", "stale_swa_mapping", "--config", "mha"), "stale_swa_mapping takes swa"),
        (("run", "--fault", "clean", "--config", "nonsense"), "not 'nonsense'"),
        (("matrix", "--faults", "kv_used,nonsense"), "no 'nonsense'; there are"),
        (("matrix", "--configs", "nonsense"), "no 'nonsense'; there are mha"),
        (("matrix", "--faults", "kv_used", "--configs", "pd", "--clean-seeds", 0), "nothing to try"),
    ],
)
def test_wrong_usage(arguments, message, tmp_path):
    result = run(*arguments, "-o", tmp_path / "x")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "x").exists()


def test_run_does_not_replace_a_trace(tmp_path):
    path = tmp_path / "trace.arrow"
    path.write_text("mine")
    assert run("run", "--fault", "kv_used", "-o", path).exit_code == 2
    assert path.read_text() == "mine"
    assert run("run", "--fault", "kv_used", "-o", path, "--force").exit_code == 0


def matrix_run(path, *more, seeds=2):
    faults = "req_to_token,dedup_remap"
    return run("matrix", "--faults", faults, "--seeds", seeds, "--clean-seeds", 2, "-o", path, *more)


def test_matrix_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path, page = tmp_path / "m.parquet", tmp_path / "page.md"
    result = matrix_run(path, "--jobs", 1, "--markdown", page)
    assert result.exit_code == 0, result.stdout
    assert "every claim holds   6 trials" in result.stdout
    first = pq.read_table(path).to_pylist()
    assert [(row["fault"], row["seed"]) for row in first] == [
        ("req_to_token", 0),
        ("req_to_token", 1),
        ("dedup_remap", 0),
        ("dedup_remap", 1),
        ("clean", 0),
        ("clean", 1),
    ]
    text = page.read_text()
    assert f"kvcanary lab matrix --seeds 2 --clean-seeds 2 --faults req_to_token,dedup_remap --markdown {page}" in text
    assert "| req_to_token | 2 | 2 | 2 | 2 | 2 |" in text
    tried = []
    try_one = matrix.try_one
    monkeypatch.setattr(matrix, "try_one", lambda key: tried.append(key) or try_one(key))
    told = json.loads(matrix_run(path, "--jobs", 1, "--json", seeds=3).stdout)
    assert [(fault, seed) for fault, _, seed in tried] == [("req_to_token", 2), ("dedup_remap", 2)]
    assert pq.read_table(path).to_pylist()[:6] == first
    assert told["holds"]
    claims = {claim["fault"]: claim for claim in told["claims"]}
    assert claims["req_to_token"]["runs"] == claims["req_to_token"]["in_time"] == 3
    assert claims["dedup_remap"]["benign"]
    assert claims["clean"]["runs"] == 2


@pytest.mark.long
def test_matrix_over_processes_gives_the_same_rows(tmp_path):
    for jobs in (1, 2):
        assert matrix_run(tmp_path / f"{jobs}.parquet", "--jobs", jobs).exit_code == 0
    one, two = (
        sorted(pq.read_table(tmp_path / f"{jobs}.parquet").drop(["seconds"]).to_pylist(), key=str) for jobs in (1, 2)
    )
    assert one == two


def test_interrupted_matrix_keeps_what_is_done(tmp_path, monkeypatch):
    done = []

    def interrupted(key):
        if done:
            raise KeyboardInterrupt
        done.append(key)
        return Row(fault=key[0], config=key[1], seed=key[2], forwards=77)

    monkeypatch.setattr(matrix, "try_one", interrupted)
    result = matrix_run(tmp_path / "m.parquet", "--jobs", 1)
    assert result.exit_code == 1  # click's own; a program's is below
    assert "keeps what is done" in result.stderr
    (row,) = pq.read_table(tmp_path / "m.parquet").to_pylist()
    assert (row["fault"], row["forwards"]) == ("req_to_token", 77)


def test_a_signal_to_all_processes_stops_a_matrix_in_order(tmp_path):
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "kvcanary", "lab", "matrix", "--faults", "kv_used"]
    command += ["--seeds", "5000", "--jobs", "2"]
    environ = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=pipe, text=True, start_new_session=True) as matrix:
        while len(list((tmp_path / "tmp").glob("kvcanary-lab-*"))) < 2:  # until both processes are at work
            assert matrix.poll() is None
            time.sleep(0.02)
        os.killpg(matrix.pid, signal.SIGTERM)
        _, told = matrix.communicate()
    assert matrix.returncode == 143
    assert told == "stopped; matrix.parquet keeps what is done, the same command goes on\ninterrupted\n"
    assert (tmp_path / "matrix.parquet").exists()
    assert not list((tmp_path / "tmp").glob("kvcanary-lab-*"))


def test_a_killed_worker_is_told_with_a_way_out(tmp_path, monkeypatch):
    def killed(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(matrix, "as_they_come", killed)
    result = matrix_run(tmp_path / "m.parquet", "--jobs", 2)
    assert result.exit_code == 2
    assert "Error: a worker was killed" in result.stderr
    assert "the same command goes on, with fewer --jobs" in result.stderr


def test_a_trial_that_the_lab_failed_at_is_tried_again(tmp_path, monkeypatch):
    options = ("--faults", "none", "--clean-seeds", 1, "--jobs", 1, "-o", tmp_path / "m.parquet")
    with monkeypatch.context() as full:
        full.setattr(TraceFile, "write", no_space)
        result = run("matrix", *options)
        assert result.exit_code == 1
        assert "the lab failed: TraceError" in result.stdout
        assert "No space left on device" in result.stdout
    result = run("matrix", *options)
    assert "every claim holds   1 trial" in result.stdout


def test_run_that_could_not_be_written_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(TraceFile, "write", no_space)
    result = run("run", "--fault", "double_free", "-o", tmp_path / "t.arrow")
    assert result.exit_code == 2
    assert "No space left on device; make room" in result.stderr
    assert not result.stdout


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_run_of_a_pair_names_the_folder_that_cannot_be_made(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    result = run("run", "--fault", "clean", "--config", "pd", "-o", path)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {path}: cannot be written: File exists\n"


def test_what_is_named_twice_is_tried_once(tmp_path):
    options = ("--faults", "kv_used, kv_used", "--seeds", 1, "--clean-seeds", 0, "--jobs", 1)
    assert "1 trial " in run("matrix", *options, "-o", tmp_path / "m.parquet").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", 10**13], "not in the range 0<=x<=100000"),
        (["--markdown", "none/page.md"], "there is no folder none"),
        (["--faults", ""], "no ''; there are kv_used"),
    ],
)
def test_matrix_refuses_before_it_begins(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matrix, "try_one", lambda _: pytest.fail("it has begun"))
    result = run("matrix", "--jobs", 1, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


WRONG = {
    "not detected": Row(fault="req_to_token", config="mha", seed=0, injected=True, effect="content", effect_forward=9),
    "detected in 11": Row(
        fault="req_to_token",
        config="mha",
        seed=0,
        injected=True,
        effect="content",
        effect_forward=9,
        detected=True,
        detected_by="x",
        first_detection_forward=11,
        delay=2,
    ),
    "reported without reason: x": Row(fault="req_to_token", config="mha", seed=0, false_positive="x"),
    "the lab failed: y": Row(fault="req_to_token", config="mha", seed=0, error="y"),
    "though nothing was broken": Row(fault="clean", config="mha", seed=0, effect="content", effect_forward=4),
}


@pytest.mark.parametrize("message", WRONG)
def test_matrix_fails_where_a_claim_does(message, tmp_path, monkeypatch):
    row = WRONG[message]
    monkeypatch.setattr(matrix, "try_one", lambda key: row)
    seeds = (0, 1) if row.fault == "clean" else (1, 0)
    options = ("--faults", "req_to_token", "--seeds", seeds[0], "--clean-seeds", seeds[1], "--jobs", 1)
    page = tmp_path / "page.md"
    result = run("matrix", *options, "-o", tmp_path / "m.parquet", "--markdown", page)
    assert result.exit_code == 1
    assert message in result.stdout
    assert message in page.read_text()


def test_matrix_leaves_other_results_alone(tmp_path, monkeypatch):
    path = tmp_path / "m.parquet"
    matrix.save(path, [])
    monkeypatch.setattr(matrix, "build_id", lambda: "another")
    result = matrix_run(path, "--jobs", 1)
    assert result.exit_code == 2
    assert "start anew with --force" in result.stderr
    path.write_text("no parquet")
    assert "expected a results file" in matrix_run(path, "--jobs", 1).stderr
    assert path.read_text() == "no parquet"


def test_a_lab_never_loads_torch(tmp_path):
    code = (
        "import sys; from kvcanary.replayer.lab.matrix import try_one; "
        "row = try_one(('kv_used', 'mha', 2)); assert row.detected and not row.error; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
