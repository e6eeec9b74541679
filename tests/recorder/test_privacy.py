"""Salted hashes in place of tokens: nothing plain in the file, and every verdict as it would have been."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.recorder.capture.privacy import TABLE_TOKENS, Privacy, with_privacy
from kvcanary.recorder.cli.inspect import inspect_command
from kvcanary.recorder.cli.simulate import simulate_command
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pd_pair import PdPair
from kvcanary.recorder.process.environment import read_environment
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import KvStream, Oracle, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.replayer.lab import trial as trial_module
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.run.replay import ReplaySettings, replay, replay_joined

from ..support.engines.documented_engine import contents, run_requests, toy_engine

SALT = b"sixteen bytes at least, and more"
PRIVACY = Privacy(SALT)
TOKEN_COLUMNS = ("input_ids", "sampled_tokens", "truth_tokens")


def definition(token: int) -> int:
    """Return a token's hash as the class's text says it."""
    key = hashlib.blake2b(SALT, digest_size=32, person=b"kvcanary").digest()
    block = hashlib.blake2b((token // 16).to_bytes(8, "little"), digest_size=64, key=key, person=b"token").digest()
    at = 4 * (token % 16)
    return int.from_bytes(block[at : at + 4], "little") & 0x7FFFFFFF


@pytest.mark.parametrize("token", [0, 1, 15, 16, 32_000, TABLE_TOKENS - 1, TABLE_TOKENS, (1 << 31) - 1, (1 << 62) + 5])
def test_a_hash_is_what_its_definition_says(token: int) -> None:
    hashed = Privacy(SALT).hash_tokens(np.array([token, token, 3], np.int64))
    assert hashed.dtype == np.int64
    assert hashed.tolist() == [definition(token), definition(token), definition(3)]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_what_is_unknown_stays_and_the_rest_fits_a_table(tokens: list[int]) -> None:
    hashed = PRIVACY.hash_tokens(np.array(tokens, np.int64)).tolist()
    for token, found in zip(tokens, hashed, strict=True):
        assert found == token if token < 0 else 0 <= found < 1 << 31


def test_few_tokens_share_a_hash() -> None:
    """Of 2^18 tokens, 2^18 * 2^18 / 2 / 2^31 = 16 pairs are expected to; 60 would be a broken hash."""
    hashed = Privacy(SALT).hash_tokens(np.arange(TABLE_TOKENS))
    assert TABLE_TOKENS - np.unique(hashed).size < 60


def test_names_and_tokens_are_hashed_each_by_itself() -> None:
    both, names = Privacy(SALT, names=True), Privacy(SALT, tokens=False, names=True)
    assert both.hash_name("alice's request") == names.hash_name("alice's request") != "alice's request"
    assert both.hash_name("") == ""
    assert len(both.hash_name("a\udcff")) == 16
    assert Privacy(SALT).hash_name("alice's request") == "alice's request"
    assert names.hash_tokens(np.array([7])).tolist() == [7]


def test_a_short_salt_is_refused() -> None:
    with pytest.raises(ValueError, match="the salt has 3 bytes, expected at least 16"):
        Privacy(b"abc")


PLANTED = [77_001, 91_234, 123_456, 200_003, 190_001, 5_000_017, 84_321, 65_537]


def record_planted(path: Path, **options: Any) -> list[int]:
    """Record a request whose prompt holds the planted tokens; return prompt and answer."""
    engine = toy_engine(path, compression="none", **options)
    engine.add(7, "alice's request", PLANTED, 12)
    tokens = next(iter(engine.requests.values()))[1]
    while engine.requests:
        engine.step()
    engine.recorder.sampled(forward=0, sampled_tokens=PLANTED[:1], sampled_lens=[1], sampled_logprobs=[-0.5])
    engine.recorder.close()
    assert not engine.recorder.stats().off.startswith("sampled")
    return tokens


def test_no_plain_token_and_no_salt_is_in_the_file(tmp_path: Path) -> None:
    plain, hashed = tmp_path / "plain.arrow", tmp_path / "hashed.arrow"
    record_planted(plain)
    record_planted(hashed, privacy=Privacy(SALT, names=True))

    def seen(path: Path) -> set[str]:
        raw, told = path.read_bytes(), contents(path)
        found = {
            f"{token} as {dtype}"
            for token in PLANTED
            for dtype in ("<i4", "<i8")
            if np.array(token, dtype).tobytes() in raw
        }
        found |= {
            f"{token} in {name}"
            for event in told
            for name, values in event.items()
            if isinstance(values, list)
            for token in set(values) & set(PLANTED)
        }
        found |= {name for event in told for name in ("sampled_logprobs",) if event[name]}
        return found | {text for text in ("alice", SALT.decode()) if text.encode() in raw}

    assert {f"{token} in input_ids" for token in PLANTED} | {"77001 as <i8", "alice", "sampled_logprobs"} <= seen(
        plain
    ), "the search finds"
    assert seen(hashed) == set()
    assert hashed.stat().st_mode & 0o777 == 0o600


def test_the_same_salt_gives_the_same_trace_and_another_one_another(tmp_path: Path) -> None:
    told = []
    for number, salt in enumerate([SALT, SALT, SALT[::-1]]):
        path = tmp_path / f"{number}.arrow"
        engine = toy_engine(path, privacy=Privacy(salt))
        run_requests(engine)
        engine.recorder.close()
        told.append(contents(path))
    assert told[0] == told[1]
    for one, other in zip(told[0], told[2], strict=True):
        differing = {name for name in one if one[name] != other[name]}
        assert differing <= {*TOKEN_COLUMNS, "kv_bytes"}
        assert ("input_ids" in differing) == ("kv_bytes" in differing) == (one["kind"] == "forward")


def test_kv_bytes_are_digests_that_show_which_are_equal(tmp_path: Path) -> None:
    """Whoever has the model's weights computes K and V of every token: plain bytes would tell the tokens."""
    rows = []
    for number, privacy in enumerate([None, PRIVACY]):
        path = tmp_path / f"{number}.arrow"
        engine = toy_engine(path, privacy=privacy)
        run_requests(engine)
        engine.recorder.close()
        events = [event.bytes("kv_bytes").copy() for event in read_trace(path) if event.kind == "forward"]
        rows.append([row.tobytes() for data in events for row in data.reshape(-1, 16)])
    plain, hashed = rows
    assert len(plain) == len(hashed) > 20
    assert not {*plain} & {*hashed} - {bytes(16)}
    assert len({*plain}) == len({*hashed}) == len({*zip(plain, hashed, strict=True)})


def test_rows_of_several_widths_and_of_zeros() -> None:
    streams = (
        KvStream(half="K", bytes_per_token=64, capture_bytes=48),
        KvStream(half="V", bytes_per_token=64, capture_bytes=16),
    )
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=8, streams=streams),), tables=(StateTable(rows=2, width=8),)
    )
    data = np.arange(3 * 64, dtype=np.uint8)
    data[48:96] = 0  # the second token's K
    ints = {"input_ids": np.arange(3), "kv_change_stream": np.array([1, 0]), "kv_change_slot": np.array([3, 4])}
    changed = np.concatenate([data[144:160], data[:48]])
    event = TraceEvent(kind="forward", ints=ints, bytes={"kv_bytes": data, "kv_change_bytes": changed})
    PRIVACY.hash_kv(event, header)
    hashed, changes = event.bytes["kv_bytes"], event.bytes["kv_change_bytes"]
    assert hashed.size == 192 and changes.size == 64
    assert not hashed[48:96].any()
    assert (hashed[:48].reshape(3, 16) == hashed[:16]).all()
    assert (changes[:16] == hashed[144:160]).all() and (changes[16:] == hashed[:48]).all()
    assert (event.ints["input_ids"] == np.arange(3)).all()


CLEAN_RUNS = ("host", "eagle_swa", "pd")
FAULTY_RUNS = {
    "row_reassigned_in_flight": 0,
    "req_to_token": 0,
    "kv_used": 1,
    "stale_swa_mapping": 3,
    "tokens_truncated_hash_kept": 0,
    "chunk_tail_predicted_token": 0,
}
# What differs because it is a token, made of tokens, or a time.
NOT_COMPARED = {"token", "stored_token", "expected_token", "stored_chain_hash", "expected_aux", "time_ns", "detail"}


def verdicts(folder: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch, privacy: Privacy | None) -> list[Any]:
    """Run a trial of the lab and return, for each of its traces, the verdict and all rows of its report."""
    monkeypatch.setattr(trial_module, "SimulatedEngine", functools.partial(SimulatedEngine, privacy=privacy))
    monkeypatch.setattr(trial_module, "PdPair", functools.partial(PdPair, privacy=privacy))
    configuration = CONFIGURATIONS[trial.config]
    # Tokens that no oracle foretells: it would check the plain recording and cannot check the other.
    unforetold = dataclasses.replace(configuration, engine={"sampler": "random", **configuration.engine})
    monkeypatch.setitem(CONFIGURATIONS, trial.config, unforetold)
    folder.mkdir()
    target = folder / ("pair" if configuration.pair else "trace.arrow")
    traces = list(run_trial(trial, target).traces)
    reports = [folder / f"report{number}" for number in range(len(traces))]
    for report in reports:
        report.mkdir()
    settings = ReplaySettings()
    if len(traces) > 1:
        summaries = replay_joined(traces, settings=settings, reports=reports)
    else:
        summaries = [replay(traces[0], settings=settings, report=reports[0])]
    found = []
    for trace, summary, report in zip(traces, summaries, reports, strict=True):
        with TraceReader(trace) as reader:
            assert reader.header.tokens == ("plain" if privacy is None else "hashed")
        rows = {}
        for name in ("violations", "findings"):
            table = pq.read_table(report / f"{name}.parquet")
            rows[name] = table.drop_columns([name for name in table.column_names if name in NOT_COMPARED]).to_pylist()
        found.append((summary.verdict.value, summary.forwards, rows))
    return found


@pytest.mark.parametrize("config", CLEAN_RUNS)
def test_a_clean_run_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    trial = Trial(fault=None, config=config, seed=3)
    plain = verdicts(tmp_path / "plain", trial, monkeypatch, None)
    hashed = verdicts(tmp_path / "hashed", trial, monkeypatch, Privacy(SALT))
    assert plain == hashed
    assert {verdict for verdict, _, _ in hashed} == {"clean"}


@pytest.mark.parametrize("fault", FAULTY_RUNS)
@pytest.mark.one_in(3)
def test_a_faulty_run_has_the_same_violations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    config = FAULTS[fault].configs[0]
    trial = Trial(fault=FAULTS[fault], config=config, seed=FAULTY_RUNS[fault])
    plain = verdicts(tmp_path / "plain", trial, monkeypatch, None)
    hashed = verdicts(tmp_path / "hashed", trial, monkeypatch, Privacy(SALT))
    assert any(verdict == "corrupt" for verdict, _, _ in plain)
    assert plain == hashed


def test_an_oracle_is_left_out_and_that_is_said() -> None:
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=4),),
        tables=(StateTable(rows=2, width=2),),
        oracle=Oracle(vocab_size=9),
        notes=("first",),
    )
    hashed = with_privacy(header, Privacy(SALT))
    assert (hashed.tokens, hashed.oracle) == ("hashed", None)
    assert hashed.notes == ("first", "tokens are salted hashes: the engine's hash oracle is not checked against")
    named = with_privacy(header, Privacy(SALT, tokens=False, names=True))
    assert (named.tokens, named.oracle) == ("plain", header.oracle)
    assert named.notes[-1] == "the requests' names are salted hashes"


def test_an_older_header_has_plain_tokens() -> None:
    header = TraceHeader(groups=(PoolGroup(name="full", num_slots=4),), tables=(StateTable(rows=2, width=2),))
    told = json.loads(header.to_json())
    del told["tokens"]
    assert TraceHeader.from_json(json.dumps(told)).tokens == "plain"


@pytest.mark.parametrize("shared", [True, False])
def test_settings_make_the_hash(tmp_path: Path, shared: bool) -> None:
    environ = {"KVCANARY_TRACE": str(tmp_path), "KVCANARY_TOKENS": "hashed", "KVCANARY_NAMES": "hashed"}
    if shared:
        (tmp_path / "salt").write_text("0123456789abcdef0123456789abcdef\n")
        environ["KVCANARY_TOKEN_SALT_FILE"] = str(tmp_path / "salt")
    processes = []
    for _ in range(2):
        settings = read_environment(environ)
        assert settings is not None
        privacy = settings.writer_options()["privacy"]
        processes.append((privacy.hash_tokens(np.arange(9)).tolist(), privacy.hash_name("r")))
    assert (processes[0] == processes[1]) == shared


def test_the_commands_know_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.arrow"
    made = CliRunner().invoke(simulate_command, ["-o", str(path), "--requests", "3", "--tokens", "hashed"])
    assert made.exit_code == 0, made.output
    tokens = [token for event in read_trace(path) for token in event.ints("input_ids").tolist()]
    assert max(tokens) > 32_000, "above the simulated vocabulary"
    shown = CliRunner().invoke(inspect_command, [str(path)])
    assert "tokens hashed" in shown.output
    assert "the KV bytes are keyed digests" in " ".join(shown.output.split())
    assert replay(path, settings=ReplaySettings(), report=None).verdict.value == "clean"


def test_no_error_of_the_engines_or_of_ours_is_quoted_beside_hashes(tmp_path: Path) -> None:
    """What an exception says may be a token or a name: a KeyError is its key."""
    for privacy, quoted in ((PRIVACY, False), (Privacy(SALT, tokens=False, names=True), False), (None, True)):
        path = tmp_path / "trace.arrow"
        engine = toy_engine(path, overwrite=True, privacy=privacy)
        recorder = engine.recorder
        recorder.lost(f"a hook is no longer recorded: {recorder.error_text(KeyError('31337 is a token'))}")
        recorder.request(request_id="the secret name")  # type: ignore[arg-type]
        recorder.close()
        notes = [event["note"] for event in contents(path)]
        assert len(notes) == 2
        assert all(kind in note for kind, note in zip(("KeyError", "ValueError"), notes, strict=True))
        assert [("31337" in note, "secret" in note) for note in notes] == [(quoted, False), (False, quoted)]
