"""Nothing is judged from a column that the recorder derived: not clean by it, and not corrupt by it either."""

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest
from kvcanary.recorder.trace.checksum import text_crc32c
from kvcanary.recorder.trace.header import NotWatched, TraceHeader
from kvcanary.recorder.trace.schema import HEADER_CRC_KEY, HEADER_KEY
from kvcanary.replayer.report.summary import Summary, Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.places import DATA


def _with_header(source: Path, target: Path, **changes: object) -> Path:
    """Write a trace anew under another header."""
    with pa.OSFile(str(source)) as file, pa.ipc.open_file(file) as trace:
        header = TraceHeader.from_json(trace.schema.metadata[HEADER_KEY])
        runner = changes.pop("derived", None)
        if runner is not None:
            changes["runners"] = tuple(dataclasses.replace(r, derived=runner) for r in header.runners)
        text = dataclasses.replace(header, **changes).to_json().encode()  # type: ignore[arg-type]  # a header's fields
        crc = str(text_crc32c(text)).encode()
        schema = trace.schema.with_metadata({**trace.schema.metadata, HEADER_KEY: text, HEADER_CRC_KEY: crc})
        with pa.OSFile(str(target), "wb") as out, pa.ipc.new_file(out, schema) as writer:
            for number in range(trace.num_record_batches):
                batch, metadata = trace.get_batch_with_custom_metadata(number)
                writer.write_batch(batch.replace_schema_metadata(schema.metadata), custom_metadata=metadata)
    return target


def _replayed(trace: Path) -> Summary:
    found = [
        replay(trace, settings=ReplaySettings(executor=executor), report=None) for executor in ("interval", "stepwise")
    ]
    assert found[0].violations_by_reason == found[1].violations_by_reason
    assert (found[0].verdict, found[0].findings_by_kind) == (found[1].verdict, found[1].findings_by_kind)
    return found[0]


@pytest.mark.parametrize(
    ("trace", "column", "gone"),
    [
        ("position_plus_one", "positions", {"VERIFY_POSITION", "WRITE_POSITION"}),
        ("token_swap", "input_ids", {"VERIFY_TOKEN", "WRITE_TOKEN", "input_not_sampled", "input_not_truth"}),
        ("table_swap", "prefix_lens", {"VERIFY_CHAIN_HASH", "VERIFY_POSITION", "VERIFY_TOKEN", "VERIFY_KV_HASH"}),
        ("kv_flip", "kv_change_slot", {"VERIFY_KV_HASH"}),
    ],
)
def test_nothing_is_found_by_means_of_a_derived_column(trace: str, column: str, gone: set[str], tmp_path: Path) -> None:
    whole = _replayed(DATA / f"{trace}.arrow")
    assert whole.verdict is Verdict.CORRUPT
    assert gone & {*whole.violations_by_reason, *whole.findings_by_kind}
    found = _replayed(_with_header(DATA / f"{trace}.arrow", tmp_path / "t.arrow", derived=(column,)))
    assert not gone & {*found.violations_by_reason, *found.findings_by_kind}
    assert f"{column} (derived)" in found.to_json()["not_watched"]


def test_what_does_not_stand_on_the_column_is_still_found(tmp_path: Path) -> None:
    trace = _with_header(DATA / "kv_flip.arrow", tmp_path / "t.arrow", derived=("positions", "input_ids"))
    assert _replayed(trace).violations_by_reason == _replayed(DATA / "kv_flip.arrow").violations_by_reason


def test_where_every_check_stands_on_derived_columns_nothing_was_checked(tmp_path: Path) -> None:
    trace = _with_header(DATA / "table_swap.arrow", tmp_path / "t.arrow", derived=("out_cache_loc",))
    found = _replayed(trace)
    assert (found.verdict, found.violations, found.findings) == (Verdict.INCONCLUSIVE, 0, 0)
    assert "derived, so nothing was checked" in found.doubts[0]


def test_a_runner_that_is_said_not_to_be_watched_may_be_silent(tmp_path: Path) -> None:
    source = DATA / "clean_llama.arrow"
    with pa.OSFile(str(source)) as file, pa.ipc.open_file(file) as trace:
        header = TraceHeader.from_json(trace.schema.metadata[HEADER_KEY])
    runners = (*header.runners, dataclasses.replace(header.runners[0], name="draft", token_offset=1))
    silent = _with_header(source, tmp_path / "silent.arrow", runners=runners)
    assert _replayed(silent).findings_by_kind == {"launch_missing": 1}
    left_out = (NotWatched(what="graph", name="draft", reason="its steps run inside a CUDA graph"),)
    said = _with_header(source, tmp_path / "said.arrow", runners=runners, not_watched=left_out)
    found = _replayed(said)
    assert found.verdict is Verdict.CLEAN
    assert "draft" in found.to_json()["not_watched"]
