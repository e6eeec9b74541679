"""The traces of two tensor-parallel ranks of a real SGLang on two GPUs: a verdict each, and one over both."""

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.cli.replay import replay_command

from ..support.places import DATA

RANKS = DATA / "sglang" / "tp2_h200"


def replayed(folder: Path) -> tuple[int, dict]:
    result = CliRunner().invoke(replay_command, ["--json", "--no-report", str(folder)])
    return result.exit_code, json.loads(result.stdout)


def test_both_ranks_are_clean_and_ran_the_same_schedule():
    code, told = replayed(RANKS)
    assert (code, told["verdict"]) == (0, "clean")
    assert [one["ranks"]["tp_rank"] for one in told["recordings"]] == [0, 1]
    assert [one["forwards"] for one in told["recordings"]] == [46, 46]


def test_a_rank_that_wrote_elsewhere_is_named(tmp_path):
    """Rank 1 takes forward 20's token to another slot than rank 0."""
    (tmp_path / "rank0.arrow").write_bytes((RANKS / "rank0.arrow").read_bytes())
    with TraceReader(RANKS / "rank1.arrow") as reader:
        header = reader.header
    with TraceWriter(tmp_path / "rank1.arrow", header) as writer:
        for view in read_trace(RANKS / "rank1.arrow"):
            ints = {name: np.array(view.ints(name)) for name in INT_LISTS if len(view.ints(name))}
            if view.kind == "forward" and view.scalar("forward") == 20:
                ints["out_cache_loc"][0] += 1
            writer.append(
                TraceEvent(
                    kind=view.kind,
                    time_ns=int(view.scalar("time_ns")),
                    scalars={
                        name: view.scalar(name)
                        for name, (_, default) in SCALARS.items()
                        if name not in ("event", "kind", "time_ns") and view.scalar(name) != default
                    },
                    ints=ints,
                    bytes={name: np.array(view.bytes(name)) for name in BYTE_LISTS if len(view.bytes(name))},
                )
            )
    code, told = replayed(tmp_path)
    assert code == 1
    (other,) = [one for one in told["recordings"] if one["findings_by_kind"].get("ranks_disagree")]
    assert other["first_finding"]["forward"] == 20
