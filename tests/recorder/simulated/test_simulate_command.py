"""`kvcanary simulate`."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.recorder.cli.simulate import simulate_command
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pools import KvPool
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.trace_file import TraceFile
from kvcanary.replayer.run.replay import ReplaySettings, replay_joined

from ...support.engines.simulated_engines import judge

SMALL = ["--requests", "12", "--prompt-tokens", "40", "--output-tokens", "10"]


def run(*arguments):
    return CliRunner().invoke(simulate_command, [str(a) for a in arguments])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--shape", "swa", "--window", "16", "--sweep-interval", "8"],
        ["--eagle"],
        ["--shape", "mla", "--host-tokens", "256", "--overlap"],
    ],
)
def test_records_a_clean_trace(tmp_path, options):
    path = tmp_path / "trace.arrow"
    result = run("-o", path, *SMALL, *options, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["counters"]["finished"] == 12
    assert told["dropped_events"] == 0
    assert told["tokens_per_second"] > 0
    summary = judge(path)
    assert summary.verdict.value == "clean"
    assert summary.forwards == told["counters"]["forwards"]


def test_a_pair_makes_two_traces(tmp_path):
    folder = tmp_path / "pair"
    result = run("-o", folder, *SMALL, "--pd", "--failure-rate", "0.2", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["decode"]["counters"]["finished"] + told["decode"]["counters"]["aborted"] == 12
    paths = [Path(told[side]["trace"]) for side in ("prefill", "decode")]
    assert paths == [folder / "prefill.arrow", folder / "decode.arrow"]
    summaries = replay_joined(paths, settings=ReplaySettings(), reports=[None, None])
    assert [summary.verdict.value for summary in summaries] == ["clean", "clean"]
    again = run("-o", folder, *SMALL, "--pd")
    assert again.exit_code == 2
    assert "prefill.arrow" in again.stderr
    shown = run("-o", folder, *SMALL, "--pd", "--force")
    assert f"next    kvcanary-replay {paths[0]} {paths[1]}" in shown.stdout


def test_screen_says_what_happened_and_what_next(tmp_path):
    path = tmp_path / "trace.arrow"
    result = run("-o", path, *SMALL)
    assert result.exit_code == 0, result.output
    assert "12 requests finished" in result.stdout
    assert "tokens/s" in result.stdout
    assert f"next    kvcanary-replay {path}" in result.stdout
    assert not result.stderr


def test_workload_file(tmp_path):
    workload, path = tmp_path / "w.jsonl", tmp_path / "trace.arrow"
    line = '{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}\n'
    workload.write_text(line * 8)
    result = run("-o", path, "--workload", workload, "--fraction", "0.5", "--json")
    assert result.exit_code == 0, result.output
    counters = json.loads(result.stdout)["counters"]
    assert counters["finished"] == 4
    assert counters["cache_hit_tokens"] >= 512
    assert judge(path).verdict.value == "clean"


def test_usage_errors_exit_2_and_leave_no_trace(tmp_path):
    path = tmp_path / "trace.arrow"
    bad = tmp_path / "w.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    for options, message in (
        (["--workload", bad], f"{bad}: line 1: expected "),
        (["--workload", bad], "required field `input_length`"),
        (["--workload", tmp_path / "none.jsonl"], "cannot be read"),
        (["--eagle", "--mixed"], "exclude one another"),
        (["--eagle", "--overlap"], "exclude one another"),
        (["--sweep-interval", "4", "--no-prefix-cache"], "sweep_interval needs the prefix cache"),
        (["--shape", "swa", "--swa-tokens", "16"], "swa_num_pages"),
        (["--chunk-tokens", "4", "--page-size", "8"], "chunk_tokens"),
        (["--shape", "gqa"], "gqa"),
        (["--fraction", "0"], "fraction"),
        (["--arrival-rate", "nan"], "arrival_rate is nan, expected `float` > 0.0"),
        (["--priorities", 1 << 70], "priorities is 1180591620717411303424, expected "),
    ):
        result = run("-o", path, *options)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert "Traceback" not in result.stderr
        assert not path.exists()


def test_existing_file_is_kept_unless_forced(tmp_path):
    path = tmp_path / "trace.arrow"
    path.write_text("mine")
    assert run("-o", path, *SMALL).exit_code == 2
    assert path.read_text() == "mine"
    assert run("-o", path, *SMALL, "--force").exit_code == 0
    assert judge(path).verdict.value == "clean"


def test_help_teaches_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom kvcanary.recorder.cli.simulate import simulate_command\n"
        "try:\n    simulate_command(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numba', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--workload conversation_trace.jsonl" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_running_it_never_loads_torch(tmp_path):
    code = (
        "import sys\nfrom kvcanary.recorder.cli.simulate import simulate_command\n"
        f"simulate_command(['-o', {str(tmp_path / 't.arrow')!r}, '--requests', '3'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_one_of_a_kind_is_named_as_one(tmp_path):
    shown = run("-o", tmp_path / "trace.arrow", "--requests", "1", "--prompt-tokens", "20", "--output-tokens", "4")
    assert "1 idle forward," in shown.stdout
    assert "cache hit" not in shown.stdout


def test_segments_of_an_earlier_recording_are_not_taken_for_its_own(tmp_path):
    path = tmp_path / "trace.arrow"
    assert run("-o", path, *SMALL, "--segment-bytes", "1").exit_code == 0
    told = json.loads(run("-o", path, *SMALL, "--json").stdout)
    assert "segments" not in told
    assert told["bytes"] == path.stat().st_size
    assert f"next    kvcanary-replay {path}\n" in run("-o", path, *SMALL, "--force").stdout
    cut = run("-o", path, *SMALL, "--segment-bytes", "1", "--force", "--json")
    segments = json.loads(cut.stdout)["segments"]  # how many: that depends on how long the run took
    assert segments[0] == str(tmp_path / "trace.000000.arrow")
    assert segments == sorted(map(str, tmp_path.glob("trace.0*.arrow")))


@pytest.mark.parametrize("options", [[], ["--pd"], ["--json"]])
def test_a_trace_that_could_not_be_written_is_no_success(tmp_path, monkeypatch, options):
    monkeypatch.setattr(TraceFile, "write", full)
    result = run("-o", tmp_path / "t", *SMALL, *options)
    assert result.exit_code == 2
    assert "No space left on device; make room, then run it again with --force" in result.stderr
    assert "too slow" not in result.stdout
    assert "next" not in result.stdout


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    assert run("-o", path, *SMALL, "--pd").stderr == f"Error: {path}: cannot be written: File exists\n"
    assert path.read_text() == "mine"


def test_too_little_memory_is_told_with_a_way_out(tmp_path, monkeypatch):
    def none(*_, **__):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(KvPool, "__init__", none)
    result = run("-o", tmp_path / "t", *SMALL)
    assert result.exit_code == 2
    assert "Error: Unable to allocate 9 TiB: less memory is needed with a smaller --pool-tokens" in result.stderr


def test_a_simulation_that_was_interrupted_says_so_in_its_trace(tmp_path, monkeypatch):
    step, left = SimulatedEngine.step, iter(range(40))

    def interrupted(self):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(SimulatedEngine, "step", interrupted)
    done = CliRunner().invoke(simulate_command, ["-o", str(tmp_path / "t.arrow"), "--requests", "300"])
    assert done.exit_code != 0 and "ends where it was interrupted" in done.output
    with TraceReader(tmp_path / "t.arrow") as reader:
        notes = [view.scalar("note") for batch in reader.stream() for view in batch if view.kind == "mark"]
        assert reader.complete and notes[-1].startswith("interrupted: ")
